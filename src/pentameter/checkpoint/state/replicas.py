"""Comparison of replicas: a tensor, or a region (rectangular block) of one, that several ranks hold
must have the same bits on each.

Ranks replicate tensors in many ways (data parallelism, norms under tensor parallelism, replicated
shards, a tied embedding at both ends of a pipeline), and a checkpoint takes each region from a
single rank. `owners.holdings` says which regions a rank holds and which other ranks hold them. The
comparison uses hashes; `content_hash` says which differences they can miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from pentameter import keyed
from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.format.owners import Groups, Ranks, Region, holdings, views_agree
from pentameter.processes.failures.failure import spelled
from pentameter.processes.group.world import World

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

_CHUNK_WORDS = 2**18  # 2 MB: stays in a CPU's cache, and is enough work for a GPU's kernel


def differing_replicas(
    groups: Groups,
    world: World,
    meshes: Sequence[DeviceMesh],
    stages_of: Mapping[str, tuple[int, ...]] | None = None,
) -> str | None:
    """Return a sentence that names a tensor whose replicas differ and the ranks that hold them, the
    same on every rank. Return None if all replicas are equal.

    Each rank passes `groups` (`model` or `optimizer` → name → tensor) with the tensors it has,
    replicas included, the layout's `meshes`, and `stages_of` (parameter name → its coordinates
    along `pipeline`, if it is in several stages). Collective: one all-gather, with one hash for
    each set of ranks that hold the same tensors. If those hashes differ, or placements do not
    determine the holders, the hash of every tensor is gathered, too.
    """
    if world.size == 1:
        return None
    hashes: dict[Region, int] = {}

    def summed() -> tuple[bytes, dict[Ranks, bytes]]:
        holds = holdings(groups, meshes, stages_of)
        hashes.update(zip(holds.tensors, _hashes(list(holds.tensors.values())), strict=True))
        return holds.view, _hash_of_sets(holds.ranks_of, hashes)

    views, sums = zip(*world.gathered(summed), strict=True)
    if views_agree(views, meshes) and not _some_differ(sums):
        return None
    return _first_difference(hashes, world)


def _hash_of_sets(
    ranks_of: Mapping[Region, Ranks], hashes: Mapping[Region, int]
) -> dict[Ranks, bytes]:
    """Return one hash (8 bytes) for each set of several ranks that hold replicas of the same
    regions: a hash over the contents of all regions that exactly these ranks hold. `ranks_of` maps
    each region of this rank to the ranks that hold it, `hashes` to the hash of its content."""
    content: dict[Ranks, list[tuple[str, int]]] = {}
    for region, ranks in ranks_of.items():
        if len(ranks) > 1:
            content.setdefault(ranks, []).append((repr(region), hashes[region]))
    return {
        ranks: blake2b(repr(sorted(each)).encode(), digest_size=8).digest()
        for ranks, each in content.items()
    }


def _some_differ(sums: Sequence[Mapping[Ranks, bytes]]) -> bool:
    """Return True if ranks that hold the same regions have different hashes of them. `sums` has an
    entry for each rank, in order, from `_hash_of_sets` there: set of ranks → hash of what exactly
    these ranks hold."""
    every = {ranks for of_rank in sums for ranks in of_rank}
    return any(len({sums[rank].get(ranks) for rank in ranks}) > 1 for ranks in every)


def _first_difference(hashes: Mapping[Region, int], world: World) -> str | None:
    """Return a sentence that names the first tensor whose replicas differ, and the ranks; None if
    all are equal. `hashes` has this rank's content hash for every region that it holds.

    Collective: one all-gather, and a second one if some replicas differ.
    """
    table = np.array([_identities(hashes), list(hashes.values())], dtype=np.int64)
    found = [
        np.frombuffer(local, np.int64).reshape(2, -1) for local in world.all_gather(table.tobytes())
    ]
    ranks_of: dict[int, dict[int, list[int]]] = {}  # identity → hash → ranks
    for rank, (identities, contents) in enumerate(found):
        for identity, content in zip(identities.tolist(), contents.tolist(), strict=True):
            ranks_of.setdefault(identity, {}).setdefault(content, []).append(rank)
    different = {identity: by for identity, by in ranks_of.items() if len(by) > 1}
    if not different:
        return None
    # Other pipeline stages do not know the name, so a rank that holds the tensor sends it.
    local = [
        f"{region.group} tensor {region.piece.name} {_differing_ranks(different[identity])}"
        for region, identity in zip(hashes, table[0].tolist(), strict=True)
        if identity in different
    ]
    first = next(of_rank[0] for of_rank in world.all_gather(local[:1]) if of_rank)
    more = f", and so of {len(different) - 1} more" if len(different) > 1 else ""
    return f"{first}{more}"


def content_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Hash a tensor's bits into an int64, 0-dim, on the tensor's device. Equal contents give equal
    hashes, whatever the strides and the device.

    The bits are read as 64-bit words x, and Σ (m_c · x_rc) · m_r is summed modulo 2⁶⁴ over matrix
    rows r with 2¹⁸ words (columns c) each. Each multiplier m is an odd number drawn from its
    position. An odd number has an inverse modulo 2⁶⁴, so a change within one word always changes
    the sum. Changes in several words by multiples of 2ᵗ (t = 22 if every fp32 word flips bit 22)
    cancel by chance in one of about 2⁶³⁻ᵗ cases. This is no protection from an adversary: the
    multipliers are known.
    """
    import torch
    import torch.nn.functional as F

    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if content.numel() % 8 or content.storage_offset() % 8:
        content = F.pad(content, (0, -content.numel() % 8))
    multipliers = _multipliers(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for row, words in enumerate(content.view(torch.int64).split(_CHUNK_WORDS)):
        row_sum = (words * multipliers[: len(words)]).sum()
        total += row_sum * multipliers[-1 - row % _CHUNK_WORDS]
    return total


@cache  # a pure function whose value every tensor needs
def _multipliers(device: torch.device) -> torch.Tensor:
    """Return the multipliers for `content_hash`: one odd 64-bit number per word in a row, int64
    (2¹⁸,)."""
    import torch

    index = np.arange(_CHUNK_WORDS, dtype=np.int32)
    low, high = (keyed.bits(keyed.make_key("copies", half), index) for half in range(2))
    words = (high.astype(np.int64) << 32) | low.astype(np.int64) & keyed.WORD | 1
    return torch.from_numpy(words).to(device)


def _hashes(tensors: Sequence[torch.Tensor | LazyTensor]) -> list[int]:
    """Return each tensor's `content_hash` as an int, in order, with one synchronization per
    device."""
    import torch

    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        computed = tensor[...]
        by_device.setdefault(computed.device, []).append((number, computed))
    hashes = [0] * len(tensors)
    for numbered in by_device.values():
        content = torch.stack([content_hash(tensor) for _, tensor in numbered]).tolist()
        for (number, _), value in zip(numbered, content, strict=True):
            hashes[number] = value
    return hashes


def _identities(regions: Mapping[Region, object]) -> list[int]:
    """Return a signed 64-bit identity for each region, in order: equal for equal group, name,
    shape, offset, sizes and dtype."""
    return [
        int.from_bytes(
            blake2b(repr(region).encode(), digest_size=8).digest(), "little", signed=True
        )
        for region in regions
    ]


def _differing_ranks(ranks_by_hash: Mapping[int, Sequence[int]]) -> str:
    """Describe the ranks that differ: hash → ranks becomes `of rank 2 is not that of ranks 0, 1 and
    3`. The majority is taken as right. If the two largest parties are equal in size, the one with
    rank 0 comes last, and either may be wrong."""
    parties = sorted(ranks_by_hash.values(), key=lambda ranks: (-len(ranks), ranks))
    odd = sorted(rank for ranks in parties[1:] for rank in ranks)
    either = " (either may be wrong)" if len(parties[0]) == len(parties[1]) else ""
    return f"of {spelled(odd)} is not that of {spelled(parties[0])}{either}"
