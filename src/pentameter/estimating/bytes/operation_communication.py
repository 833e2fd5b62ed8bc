"""Communication in a micro-batch, added up over the collectives that each operation lists.

Bytes are counted as in `communication.py`. The 2-D, 2.5-D and 3-D tensor modes use other
collectives (`grid_communication.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from pentameter.config.choices import refuse_unknown
from pentameter.estimating.bytes.costs import Step, attention_elements
from pentameter.planning.adapters import Run
from pentameter.planning.architecture import (
    ActivationTensor,
    Axis,
    Collective,
    CollectiveKind,
    Operation,
)
from pentameter.planning.buckets import MAX_LOGITS, row_chunks

Kind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send",
    "receive",
]
When = Literal["forward", "backward", "beside"]
"""Time at which an operation communicates: "forward" or "backward" (that pass waits for it), or
"beside" (overlapped with matmuls in the backward pass)."""

OF_MATRICES: tuple[CollectiveKind, ...] = ("gather", "sum")


class Sent(NamedTuple):
    """The number of times that one rank calls one kind of collective or message along one mesh
    dimension, in one micro-batch, and with how many bytes."""

    dimension: str
    kind: Kind
    n_bytes: int
    """Bytes per call."""
    calls: int = 1
    when: When = "forward"


@dataclass(frozen=True)
class OperationCommunication:
    """Computes what one rank sends and receives in one micro-batch for the operations of its
    pipeline stages. `coordinates` are the rank's on the mesh; `runs` has the operations of each of
    its stages."""

    step: Step
    coordinates: Mapping[str, int]
    runs: Sequence[Run]

    @cached_property
    def repeated(self) -> set[str]:
        """Names of the operations whose results activation checkpointing recomputes in the backward
        pass."""
        if self.step.config.train.activation_checkpoint is None:
            return set()
        groups = (operations for run in self.runs for operations, _ in run.groups)
        return set().union(*map(recomputed_results, groups))

    def sent(self, kinds: Collection[CollectiveKind] | None = None) -> Iterator[Sent]:
        """Yield the calls, forward and backward, of the collectives that operations list, limited
        to `kinds` (None: all). Equal blocks yield one entry, with its calls multiplied by their
        number."""
        for run in self.runs:
            for operations, n in run.groups:
                for each in self._sent_by(operations, kinds):
                    yield each._replace(calls=n * each.calls)

    def _sent_by(
        self, operations: Sequence[Operation], kinds: Collection[CollectiveKind] | None
    ) -> Iterator[Sent]:
        """Yield the calls for one group of operations (a block, or one end of the model), limited
        to `kinds` unless None."""
        gathered = set()
        for op in operations:
            for each in op.collectives:
                if kinds is not None and each.kind not in kinds:
                    continue
                for dimension in self._dimensions(each):
                    if each.kind == "gather":  # once, however many matrices have this input
                        if (dimension, each.tensor) in gathered:
                            continue
                        gathered.add((dimension, each.tensor))
                    yield from self._sent(op, each, dimension)

    def _dimensions(self, each: Collective) -> tuple[str, ...]:
        """Return the mesh dimensions along which a collective communicates."""
        sharded_axes = self.step.sharding.sharded_axes
        match each.kind:
            case "dispatch" | "combine":
                return ("expert",) if self.step.layout.shards_experts else ()
            case "tokens":  # sharded for the experts, while the stream is replicated
                whole = sharded_axes.get("time", ())
                return tuple(each for each in sharded_axes.get("routed", ()) if each not in whole)
            case _:
                return sharded_axes.get(each.axis, ())

    def _sent(self, op: Operation, each: Collective, dimension: str) -> Iterator[Sent]:
        match each.kind:
            case "gather":
                return self._gather(op, each.tensor, dimension)
            case "sum":
                return self._sum(op, each.tensor, dimension)
            case "mean_squares":
                return self._mean_squares(op, each.tensor, dimension)
            case "softmax":
                return self._softmax(each.tensor, dimension)
            case "attend":
                return self._attend(op, dimension)
            case "dispatch" | "combine" | "tokens":
                return self._of_experts(op, each, dimension)
            case unknown:
                refuse_unknown(unknown, "a collective's kind", "the planner's communication")

    def _gather(self, op: Operation, x: ActivationTensor, dimension: str) -> Iterator[Sent]:
        """Yield the calls along `dimension` for `x`, an input that column-parallel matrices read:
        all-gathers of its sequence shards (none unless the dimension shards the sequence), and the
        sum of its gradient."""
        at_once = op.kind == "product" and self.step.rules.reads_at_once(self.step.config.lora)
        yield self._gather_of("forward", dimension, x)
        if op.layer is not None and self._gathers_again(at_once):
            yield self._gather_of("backward", dimension, x)
        if at_once:
            yield self._gather_of("beside", dimension, x)
        if op.gives_gradient:
            yield self._sum_of("beside" if at_once else "backward", dimension, x)

    def _sum(self, op: Operation, result: ActivationTensor, dimension: str) -> Iterator[Sent]:
        """Yield the calls along `dimension` for `result`, a row-parallel matmul's partial result:
        its sum, again if recomputed, and an all-gather of the gradient's sequence shards (none
        unless the dimension shards the sequence)."""
        yield self._sum_of("forward", dimension, result)
        if op.name in self.repeated:
            yield self._sum_of("backward", dimension, result)
        if op.reads_gradient:
            yield self._gather_of("backward", dimension, result)

    def _gathers_again(self, at_once: bool) -> bool:
        """Whether recomputing a block all-gathers the inputs of its matrices again: with full
        activation checkpointing always; with selective checkpointing unless `at_once`, since the
        result of an operation that communicates itself is kept."""
        how = self.step.config.train.activation_checkpoint
        return how == "full" or (how == "selective" and not at_once)

    def _sum_of(self, when: When, dimension: str, tensor: ActivationTensor) -> Sent:
        """Return the call that sums partial results for an activation or its gradient: an
        all-reduce or, if the dimension shards the sequence, an all-to-all, after which each rank
        sums its own shard."""
        shards_sequence = dimension in self.step.sharding.sharded_axes.get("time", ())
        kind: Kind = "all_to_all" if shards_sequence else "all_reduce"
        return Sent(dimension, kind, self._bytes_of_all_tokens(tensor), 1, when)

    def _gather_of(self, when: When, dimension: str, tensor: ActivationTensor) -> Sent:
        """Return the all-gather for an activation or its gradient; its call count is 0 unless the
        dimension shards the sequence."""
        shards_sequence = dimension in self.step.sharding.sharded_axes.get("time", ())
        n_bytes = self._bytes_of_all_tokens(tensor)
        return Sent(dimension, "all_gather", n_bytes, int(shards_sequence), when)

    def _bytes_of_all_tokens(self, tensor: ActivationTensor) -> int:
        """Return an activation's bytes on this rank for all tokens of a micro-batch: its sequence
        unsharded, its second axis sharded as it is."""
        axes: tuple[Axis, ...] = ("context", tensor.axes[1])
        n_elements = math.prod(self.step.sharding.local_shape(tensor.shape, axes, self.coordinates))
        return self.step.micro_batch_size * n_elements * self.step.bytes_of(tensor)

    def _mean_squares(
        self, op: Operation, squares: ActivationTensor, dimension: str
    ) -> Iterator[Sent]:
        """Yield the all-reduces for a norm whose channels are sharded: `squares`, one number per
        token, in the forward pass (twice if recomputed) and in the backward pass."""
        n_calls = (2 if op.name in self.repeated else 1) + op.gives_gradient
        yield Sent(dimension, "all_reduce", self._bytes_of_all_tokens(squares), n_calls)

    def _softmax(self, logits: ActivationTensor, dimension: str) -> Iterator[Sent]:
        """Yield the loss's all-reduces over the vocabulary's shards, per chunk of tokens: first
        each token's largest logit, then its sum of exponentials together with its target's
        logit."""
        T, width = self.step.sharding.local_shape(logits.shape, logits.axes)
        for rows in row_chunks(self.step.micro_batch_size * T, width, MAX_LOGITS):
            for n_columns in (1, 2):
                n_bytes = n_columns * (rows.stop - rows.start) * self.step.element_bytes
                yield Sent(dimension, "all_reduce", n_bytes)

    def _of_experts(self, op: Operation, each: Collective, dimension: str) -> Iterator[Sent]:
        if each.kind == "tokens":
            yield from self._tokens(op, each.tensor, dimension)
        else:
            yield from self._exchange(op, each, dimension)

    def _exchange(self, op: Operation, each: Collective, dimension: str) -> Iterator[Sent]:
        """Yield the calls that send rows to their experts, or the experts' outputs back, and those
        for the gradients. The numbers of rows, an int64 for each expert, are exchanged first."""
        model, n_shards = self.step.config.model, self.step.layout.expert_tensor
        assert model.experts.count is not None
        has_gradient = op.reads_gradient
        if each.kind == "dispatch":
            has_gradient = op.gives_gradient
            yield Sent(dimension, "all_to_all", 8 * model.experts.count * n_shards)
        shape, axes = each.tensor.shape, each.tensor.axes
        n_elements = math.prod(self.step.sharding.local_shape(shape, axes))
        n_rows = self.step.micro_batch_size * n_shards  # one for each shard of an expert
        n_bytes = n_rows * n_elements * self.step.bytes_of(each.tensor)
        n_calls = (2 if self._exchanges_again(op) else 1) + has_gradient
        yield Sent(dimension, "all_to_all", n_bytes, n_calls)

    def _exchanges_again(self, op: Operation) -> bool:
        """True if recomputing a block exchanges the rows of its experts again between ranks.
        Selective recomputation does not, as it keeps the rows that arrived."""
        is_full = self.step.config.train.activation_checkpoint == "full"
        return is_full and op.name in self.repeated

    def _tokens(self, op: Operation, x: ActivationTensor, dimension: str) -> Iterator[Sent]:
        """Yield the calls among ranks that have the same tokens and take a shard of them each
        through the experts: all-gathers of the outputs, and, in the backward pass, of the gradients
        of the tokens and of their k weights each."""
        model, n = self.step.config.model, self._bytes_of_all_tokens(x) // self.step.bytes_of(x)
        outputs = Sent(dimension, "all_gather", n * self.step.summed_bytes)
        yield outputs
        if self._exchanges_again(op):
            yield outputs
        if op.gives_gradient:
            n_weights = n // model.d_model * model.experts.n_chosen
            yield Sent(dimension, "all_gather", n * self.step.element_bytes, 1, "backward")
            yield Sent(dimension, "all_gather", n_weights * self.step.summed_bytes, 1, "backward")

    def _attend(self, op: Operation, dimension: str) -> Iterator[Sent]:
        """Yield the calls with which attention reaches other sequence shards. In a ring, keys and
        values travel past all ranks in each pass, and their gradients once, accumulated in at least
        float32. In all-to-all mode, two exchanges give each rank the whole sequence for some heads,
        and return the result."""
        n, p = self.step.layout.sizes[dimension], self.step.product_bytes
        n_q, n_kv = (
            self.step.micro_batch_size * n
            for n in attention_elements(op, self.step.sharding, self.coordinates)
        )
        # Selective checkpointing keeps a ring's result.
        in_ring = self.step.layout.context_mode == "ring"
        is_kept = in_ring and self.step.config.train.activation_checkpoint == "selective"
        n_backward = int(op.gives_gradient)
        n_passes = (2 if op.name in self.repeated and not is_kept else 1) + n_backward
        match self.step.layout.context_mode:
            case "ring":
                kinds: tuple[Kind, ...] = ("send", "receive")
                for kind in kinds:
                    yield Sent(dimension, kind, n_kv * p, (n - 1) * n_passes)
                    summed = n_kv * self.step.summed_bytes
                    yield Sent(dimension, kind, summed, (n - 1) * n_backward)
            case "all-to-all":
                groups_heads = self.step.config.model.attention.shares_kv_heads
                for n_elements in (n_q, n_kv, n_q) if groups_heads else (n_q + n_kv, n_q):
                    yield Sent(dimension, "all_to_all", n_elements * p, n_passes)
            case unknown:
                refuse_unknown(unknown, "parallel.context_mode", "the planner's traffic")


def recomputed_results(run: Sequence[Operation], *, with_last: bool = False) -> set[str]:
    """Return the names of operations whose results full activation checkpointing recomputes: in
    each block, all before the last one that saves a tensor. With `with_last`, that one too."""
    last_saving = {op.layer: index for index, op in enumerate(run) if op.saves}
    return {
        op.name
        for index, op in enumerate(run)
        if op.layer is not None and index < last_saving[op.layer] + with_last
    }
