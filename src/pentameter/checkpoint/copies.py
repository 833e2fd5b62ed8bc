"""Comparison of the copies that several processes hold of a tensor, or of a region of one.

Processes are copies of each other in many ways (data parallelism, norms under tensor parallelism,
replicated shards, a tied embedding at both ends of a pipeline), and a checkpoint takes each region
from one of them. Which regions a process holds is answered in one place, `held_regions`; a region
that several hold is a copy, and its bits must be equal in all. Compared are hashes: see
`content_hash` for what they can miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from pentameter import keyed
from pentameter.checkpoint.safetensors_writer import (
    Groups,
    LazyTensor,
    Region,
    held_regions,
    materialize,
)
from pentameter.processes.failure import spelled
from pentameter.processes.world import World

if TYPE_CHECKING:
    import torch

_CHUNK_WORDS = 2**18  # 2 MB: stays in a CPU's cache, and is enough work for a GPU's kernel


def differing_copies(groups: Groups, world: World) -> str | None:
    """A sentence that names a tensor whose copies differ and the ranks that hold them, the same in
    every process; None where all copies are equal. Collective: one small all-gather.

    Each process passes the groups with the tensors that it has, copies included.
    """
    if world.size == 1:
        return None
    held = world.agreed(lambda: held_regions(groups))
    table = np.array([_identities(held), _hashes(list(held.values()))], dtype=np.int64)
    found = [
        np.frombuffer(own, np.int64).reshape(2, -1) for own in world.all_gather(table.tobytes())
    ]
    ranks_of: dict[int, dict[int, list[int]]] = {}  # identity → hash → ranks
    for rank, (identities, hashes) in enumerate(found):
        for identity, content in zip(identities.tolist(), hashes.tolist(), strict=True):
            ranks_of.setdefault(identity, {}).setdefault(content, []).append(rank)
    different = {identity: by for identity, by in ranks_of.items() if len(by) > 1}
    if not different:
        return None
    # A pipeline's other stages do not know the name, so a process that holds the tensor tells it.
    own = [
        f"{region.group} tensor {region.piece.name} {_whose(different[identity])}"
        for region, identity in zip(held, table[0].tolist(), strict=True)
        if identity in different
    ]
    first = next(of_rank[0] for of_rank in world.all_gather(own[:1]) if of_rank)
    more = f", and so of {len(different) - 1} more" if len(different) > 1 else ""
    return f"{first}{more}"


def content_hash(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of a tensor's bits, int64, 0-dim, on the tensor's device; equal for equal contents,
    whatever the strides, and the same on every device.

    The bits are read as 64-bit words x, and Σ (m_c · x_rc) · m_r is summed modulo 2⁶⁴ over rows r
    of 2¹⁸ words, each multiplier an odd number drawn from its position. As an odd number has an
    inverse modulo 2⁶⁴, a change within one word always changes the sum. Changes of several words
    by amounts that 2ᵗ divides (t = 22 where every fp32 word flips bit 22) cancel by chance in one
    of about 2⁶³⁻ᵗ cases. This is no protection from an adversary: the multipliers are known.
    """
    import torch
    import torch.nn.functional as F

    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if content.numel() % 8 or content.storage_offset() % 8:
        content = F.pad(content, (0, -content.numel() % 8))
    multipliers = _multipliers(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for row, words in enumerate(content.view(torch.int64).split(_CHUNK_WORDS)):
        part = (words * multipliers[: len(words)]).sum()
        total += part * multipliers[-1 - row % _CHUNK_WORDS]
    return total


@cache  # a pure function, whose value each tensor needs
def _multipliers(device: torch.device) -> torch.Tensor:
    """Odd 64-bit numbers, as many as a row has words."""
    import torch

    index = np.arange(_CHUNK_WORDS, dtype=np.int32)
    low, high = (keyed.bits(keyed.make_key("copies", half), index) for half in range(2))
    words = (high.astype(np.int64) << 32) | low.astype(np.int64) & keyed.WORD | 1
    return torch.from_numpy(words).to(device)


def _hashes(tensors: Sequence[torch.Tensor | LazyTensor]) -> list[int]:
    """The hash of each tensor; a device is waited for once."""
    import torch

    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        there = materialize(tensor)
        by_device.setdefault(there.device, []).append((number, there))
    hashes = [0] * len(tensors)
    for numbered in by_device.values():
        content = torch.stack([content_hash(tensor) for _, tensor in numbered]).tolist()
        for (number, _), value in zip(numbered, content, strict=True):
            hashes[number] = value
    return hashes


def _identities(regions: Mapping[Region, object]) -> list[int]:
    """A number for each region, equal where its group, name, shape, place and dtype are."""
    return [
        int.from_bytes(
            blake2b(repr(region).encode(), digest_size=8).digest(), "little", signed=True
        )
        for region in regions
    ]


def _whose(ranks_by_hash: Mapping[int, Sequence[int]]) -> str:
    """`of rank 2 is not that of ranks 0, 1 and 3`, where most are right; of two parties that are
    as large, the one with rank 0 comes last, and either may be wrong."""
    parties = sorted(ranks_by_hash.values(), key=lambda ranks: (-len(ranks), ranks))
    odd = sorted(rank for ranks in parties[1:] for rank in ranks)
    either = " (either may be wrong)" if len(parties[0]) == len(parties[1]) else ""
    return f"of {spelled(odd)} is not that of {spelled(parties[0])}{either}"
