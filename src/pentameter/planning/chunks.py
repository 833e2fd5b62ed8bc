"""How the head's logits are cut into chunks, so that they never exist all at once."""

from __future__ import annotations

MAX_LOGITS = 2**26
"""Logits held at once. Fewer than that in all are left to `loss_sum`, which `torch.compile` joins
with the model; smaller chunks are slower, as each adds V · D numbers to the weight's gradient."""
TILE_ROWS = 128
"""Chunks are a multiple of this where that leaves them below the bound: a tile of a product."""


def row_chunks(n_rows: int, width: int, max_logits: int) -> list[slice]:
    """Rows of logits (n_rows, width) in the fewest chunks of `max_logits` numbers (or one row), and
    as even as that allows: one shape, or two, for what compiles the kernel."""
    most = max(1, max_logits // max(1, width))
    size = -(-n_rows // max(1, -(-n_rows // most)))
    size = min(-(-size // TILE_ROWS) * TILE_ROWS, most)
    return [slice(start, min(start + size, n_rows)) for start in range(0, n_rows, max(1, size))]
