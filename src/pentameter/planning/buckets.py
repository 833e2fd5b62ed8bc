"""Sizes that a run uses: gradient buckets for all-reduce, and chunks of logits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

COPIES_BUCKET_BYTES = 25 * 2**20
"""Bytes in one of DDP's buckets, whose all-reduces start during the backward pass. This is DDP's
own default; here it holds for the first bucket too, which DDP would make smaller."""
SUM_BUCKET_BYTES = 64 * 2**20
"""Bytes in a bucket that is all-reduced after the backward pass. Large, for few messages, because
no computation is left to overlap with."""

MAX_LOGITS = 2**26
"""Maximum logits (rows × vocabulary) in memory at once. `loss_sum` computes smaller micro-batches
unchunked, so that `torch.compile` can fuse them with the model."""
MOST_CHUNKS = 8
"""Maximum chunk count for a micro-batch's logits. Each chunk adds V · D numbers to the weight's
gradient: with 49 chunks, an H100 spent 50 ms of gpt2-124m's step on that
(`benchmarks/measurements/gpu.md`). An eighth of a large micro-batch's logits takes
little memory next to its activations."""
TILE_ROWS = 128
"""Rows in one matmul tile. Chunk sizes are multiples of it if that keeps them within the limit."""


def filled_buckets(sizes: Sequence[int]) -> list[slice]:
    """Group tensors with these sizes in bytes into buckets, and return each as a slice of their
    indices, in order. A bucket holds up to SUM_BUCKET_BYTES, or a single larger tensor."""
    starts: list[int] = []
    n_bytes = 0
    for index, size in enumerate(sizes):
        if not starts or n_bytes + size > SUM_BUCKET_BYTES:
            starts.append(index)
            n_bytes = 0
        n_bytes += size
    return [slice(a, b) for a, b in itertools.pairwise([*starts, len(sizes)])]


def row_chunks(n_rows: int, width: int, max_logits: int) -> list[slice]:
    """Split the rows in logits (n_rows, width) into the fewest chunks with at most `max_logits`
    numbers each, and return them as slices of row indices.

    A chunk may exceed `max_logits` if that is less than one row or than an eighth (MOST_CHUNKS) of
    all rows; that is then the limit. Sizes are multiples of TILE_ROWS if the limit allows, and all
    equal but the last, so that a compiler sees one or two shapes.
    """
    most = max(1, max_logits // max(1, width), -(-n_rows // MOST_CHUNKS))
    size = -(-n_rows // max(1, -(-n_rows // most)))
    size = min(-(-size // TILE_ROWS) * TILE_ROWS, most)
    return [slice(start, min(start + size, n_rows)) for start in range(0, n_rows, max(1, size))]
