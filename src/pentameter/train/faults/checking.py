"""Checks for silent corruption: faulty memory or a faulty processor changes a number, and nothing
fails.

Four things are compared, none of which needs a second model:

1. *Replicas.* Ranks that hold replicas of a tensor must hold the same bits (`different_replicas`).
2. *State.* What every rank remembers of the run (tokens, losses, the guard's history) must be the
   same.
3. *Memory.* Weights and optimizer state must be, before an update, what the last update left: each
   rank sums the words of its own shards after an update, and again before the next one. This is
   what finds a fault in a shard of which there is one copy only.
4. *Computing.* Two data-parallel replicas compute the gradients of the same micro-batch, one after
   the other: the ranks of one replica scale their loss by 1, all others by 0, so the reduced
   gradients are those of that replica alone, on any layout, and go the way of a step's. They must
   be equal to the bit. A layout with one replica computes them twice itself.

1 is made every `train.check_copies` steps, all are made every `train.check_every` steps, and before
every checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from pentameter.checkpoint.format.owners import Groups
from pentameter.checkpoint.state.replicas import content_hash, differing_replicas
from pentameter.checkpoint.state.state_dicts import model_state, optimizer_state
from pentameter.disk.atomic import sha256_of_json
from pentameter.keyed import bits, make_key
from pentameter.parallel.engine import keeping_buffers
from pentameter.parallel.local_shards import local_shard
from pentameter.planning.layouts.layout import Layout
from pentameter.processes.failures.failure import spelled
from pentameter.train.run import TrainingRun

Hashes = tuple[int, ...]
"""A hash of each rank's gradients, in rank order."""


class FaultChecks:
    """Checks one run for silent corruption of its memory, its gradients and its replicas of
    tensors. If `train.check_every` is None, only replicas are compared."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._is_full = run.config.train.check_every is not None
        self._memory = MemorySums(run)
        self._checked_step = -1

    def is_due(self) -> bool:
        """Return True if `train.check_every` asks for a check after the present step."""
        train, step = self._run.config.train, self._run.state.step
        intervals = (train.check_copies, train.check_every)
        return step > 0 and any(each is not None and step % each == 0 for each in intervals)

    def before_update(self) -> None:
        """Compare this rank's weights and optimizer state with the sums that were recorded after
        the last update: nothing may have changed them since. `fault` reports a difference later."""
        if self._is_full:
            self._memory.compare()

    def after_update(self) -> None:
        """Record sums over this rank's weights and optimizer state as the update has left them, for
        `before_update` to compare."""
        if self._is_full:
            self._memory.note()

    def forget(self) -> None:
        """Drop the recorded sums: weights and optimizer state are about to be replaced by a
        checkpoint's."""
        self._memory.forget()

    def fault(self) -> str | None:
        """Make all checks for silent corruption. Return a description of what is wrong, the same on
        every rank; None if nothing is. Collective."""
        run = self._run
        if not self._is_full:
            return _replicas_fault(run)
        self._memory.compare()
        changed, states = zip(
            *run.world.all_gather((self._memory.changed(), _state_hash(run))), strict=True
        )
        found = [f"{what} of rank {rank}" for rank, what in enumerate(changed) if what is not None]
        if found:
            return (
                f"{' and '.join(found)} changed in memory between two updates; faulty memory does "
                "this, or a hook that changes weights"
            )
        if len(set(states)) > 1:
            return f"what ranks remember of the run (tokens, losses) differs: {_odd(states)}"
        if (wrong := _replicas_fault(run)) is not None or self._checked_step == run.state.step:
            return wrong
        self._checked_step = run.state.step
        return GradientCheck(run).fault() if _is_deterministic(run) else None


def different_replicas(run: TrainingRun) -> str | None:
    """Compare the replicas of every parameter and of its optimizer state between ranks. Return the
    first difference in words, the same on every rank; None if all are equal. Collective."""
    if run.world.size == 1:
        return None
    return differing_replicas(_held(run), run.world, run.engine.meshes, run.plan.tied)


def _replicas_fault(run: TrainingRun) -> str | None:
    wrong = different_replicas(run)
    if wrong is None:
        return None
    return (
        f"{wrong}, and they should be equal copies. Faulty memory does this, or a hook that "
        "changes the weights of one process"
    )


def _held(run: TrainingRun) -> Groups:
    """Return the tensors that this rank holds, its parameters and its optimizer state, as group →
    name → tensor. Collective."""
    model_state(run.engine.models)  # shards the parameters that FSDP left gathered
    held = dict(run.engine.named_parameters())  # no buffers: batch norm's differ by rank
    return {"model": held, "optimizer": optimizer_state(run.optimizer, held.items())}


def _state_hash(run: TrainingRun) -> str:
    """Return a hash of this rank's TrainState, in which every rank should have the same. Durations
    are left out, as they differ between ranks."""
    record = run.state.to_json()
    record["train_seconds"] = record["epoch"]["seconds"] = None
    return sha256_of_json(record)


def _odd(values: Sequence[object]) -> str:
    """Return in words the ranks whose value differs from the majority's; all ranks if there is no
    majority."""
    usual = max(values, key=values.count)
    if values.count(usual) * 2 <= len(values):
        return f"{spelled(range(len(values)))}, of which any may be wrong"
    return f"that of {spelled([rank for rank, each in enumerate(values) if each != usual])} is odd"


def _is_deterministic(run: TrainingRun) -> bool:
    """Return True if the device computes the same bits twice: a CPU, or another device if PyTorch
    is told to."""
    return run.engine.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


# -- memory ---------------------------------------------------------------------------------------


class MemorySums:
    """Sums of the 64-bit words in this rank's weights and optimizer state, noted after an update.
    A change within one word always changes its tensor's sum. Nothing is copied to the host before
    `changed`."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._names: list[str] = []
        self._noted: torch.Tensor | None = None
        self._has_changed: torch.Tensor | None = None

    def note(self) -> None:
        """Record the sums of the tensors' present contents."""
        named = list(self._tensors())
        self._names = [name for name, _ in named]
        self._noted = _sums([tensor for _, tensor in named])
        if self._has_changed is not None:  # an optimizer's state appears, behind the weights
            self._has_changed = pad(self._has_changed, (0, len(named) - len(self._has_changed)))

    def compare(self) -> None:
        """Compare the tensors' present contents with the recorded sums; `changed` tells the
        result."""
        if self._noted is None:
            return
        differs = _sums([tensor for _, tensor in self._tensors()]) != self._noted
        self._has_changed = differs if self._has_changed is None else self._has_changed | differs

    def changed(self) -> str | None:
        """Return the name, with its group, of the first tensor that `compare` found changed since
        its sum was recorded; None if there is none."""
        if self._has_changed is None or not self._has_changed.any():
            return None
        return self._names[int(self._has_changed.nonzero()[0])]

    def forget(self) -> None:
        """Drop the recorded sums, and any difference that was found."""
        self._noted = self._has_changed = None

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        run = self._run
        named = dict(run.engine.named_parameters())
        yield from ((f"model tensor {name}", local_shard(each)[0]) for name, each in named.items())
        for name, each in optimizer_state(run.optimizer, named.items()).items():
            yield f"optimizer tensor {name}", local_shard(each)[0]


def _sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of each tensor's 64-bit words modulo 2⁶⁴, int64 (n,), on the device of the
    first one."""
    sums = [_word_sum(tensor) for tensor in tensors]
    return torch.stack([each.to(sums[0].device) for each in sums])


def _word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bytes, read as 64-bit words, modulo 2⁶⁴, as int64 (); bytes left
    over at the end are added as such. It takes a quarter of the time of `content_hash`, but does
    not notice words that trade places."""
    content = tensor.contiguous().view(-1).view(torch.uint8)
    if content.storage_offset() % 8:
        content = content.clone()
    end = content.numel() // 8 * 8
    return content[:end].view(torch.int64).sum() + content[end:].sum()


# -- computing ------------------------------------------------------------------------------------


class GradientCheck:
    """Has two data-parallel replicas of the model compute the gradients of the same rows of the
    latest step, and compares them. Pairs of replicas take turns, so that each one is checked in one
    of ⌈replicas / 2⌉ checks; which micro-batch is computed follows from the seed and the step.
    Methods are collective."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._layout = run.plan.layout
        self._n_replicas = self._layout.data
        self._index = run.state.step - 1  # of the latest step's batch
        train, step = run.config.train, run.state.step
        assert train.check_every is not None
        self._first = 2 * (step // train.check_every) % self._n_replicas
        drawn = bits(make_key("check", run.config.seed, step), np.zeros(1, dtype=np.int32))
        self._micro_batch = int(drawn[0]) % run.plan.n_micro_batches

    def fault(self) -> str | None:
        """Make the comparison. Return words that name the replica whose gradients are wrong, the
        same on every rank; None if all bits are equal."""
        self._run.world.activity.note("training", self._run.state.step)
        with keeping_buffers(self._run.engine.models):
            return self._difference()

    def _difference(self) -> str | None:
        """Compare the gradients of the chosen two replicas. If they differ, have further replicas
        compute them, or both again if there are only two, and return words that name the wrong one;
        else None."""
        first, n = self._first, self._n_replicas
        asked = [first, (first + 1) % n]
        found = [self._gradients_of(replica) for replica in asked]
        if found[0] == found[1]:
            return None
        asked += [(first + 2) % n] if n > 2 else asked
        found += [self._gradients_of(replica) for replica in asked[2:]]
        replicas = " and ".join(
            self._named(replica) for replica in sorted(set(_odd_replicas(asked, found)))
        )
        differing = [
            rank for rank, pair in enumerate(zip(*found[:2], strict=True)) if len({*pair}) > 1
        ]
        return (
            f"the gradients that {replicas} computed are not those that "
            f"{'another copy' if n > 1 else 'it'} computed of the same rows"
            f"{'' if n > 1 else ' before'} (they differ on {spelled(differing)}). A faulty "
            "processor, memory or link does this"
        )

    def _gradients_of(self, replica: int) -> Hashes:
        """Compute the gradients of the chosen rows with the ranks of `replica`, and return their
        hashes, and those of the loss, on every rank."""
        run, engine, layout = self._run, self._run.engine, self._layout
        counts = _replica_of(layout, run.world.rank) == replica
        batch = run.batches.batch(self._index, self._rows())
        loss = engine.forward_backward(batch, self._index, loss_scale=float(counts))
        hashes = [
            content_hash(local_shard(each.grad)[0])
            for each in engine.parameters()
            if each.grad is not None
        ]
        # A stage of which nothing is trained has none.
        values = [*(torch.stack(hashes).tolist() if hashes else []), float(loss.total)]
        engine.zero_gradients()
        digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
        return tuple(map(int.from_bytes, run.world.all_gather(digest)))

    def _rows(self) -> np.ndarray:
        """Return numbers in the global batch, int64 (B,), of the rows to compute. They are the rows
        that this rank would compute in the first of the compared replicas: one micro-batch of them,
        or all in a pipeline, which needs several to run."""
        plan, layout = self._run.plan, self._layout
        rank = _counterpart(layout, self._run.world.rank, self._first)
        rows = layout.rows(rank, plan.batch_size)
        if layout.pipeline == 1:
            start = self._micro_batch * plan.micro_batch_size
            rows = rows[start : start + plan.micro_batch_size]
        return np.arange(rows.start, rows.stop, dtype=np.int64)

    def _named(self, replica: int) -> str:
        ranks = range(self._run.world.size)
        return spelled([rank for rank in ranks if _replica_of(self._layout, rank) == replica])


def _odd_replicas(asked: Sequence[int], found: Sequence[Hashes]) -> list[int]:
    """Return the replicas whose gradients are wrong, as far as that can be told. `found` has the
    hashes of the gradients that each replica in `asked` computed, in the same order; the first two
    differ.

    What most computations gave counts as right; with two replicas, which are asked twice each, what
    three of the four gave. Without such a majority, a replica whose two results differ is wrong. If
    there is none of these either, all are returned.
    """
    usual = max(found, key=found.count)
    if found.count(usual) * 2 > len(found):
        return [replica for replica, each in zip(asked, found, strict=True) if each != usual]
    given: dict[int, set[Hashes]] = {}
    for replica, each in zip(asked, found, strict=True):
        given.setdefault(replica, set()).add(each)
    return [replica for replica, each in given.items() if len(each) > 1] or list(given)


def _replica_of(layout: Layout, rank: int) -> int:
    """Return the number of the data-parallel replica that a rank is part of."""
    coordinates = layout.coordinates(rank)
    return coordinates["data"] * layout.sizes["shard"] + coordinates["shard"]


def _counterpart(layout: Layout, rank: int, replica: int) -> int:
    """Return the rank that holds, in the data-parallel replica number `replica`, the same shards of
    the model as `rank` holds in its own replica."""
    data, shard = divmod(replica, layout.sizes["shard"])
    return layout.rank_of(**{**layout.coordinates(rank), "data": data, "shard": shard})
