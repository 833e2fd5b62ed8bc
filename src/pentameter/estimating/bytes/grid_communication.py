"""Collectives per micro-batch in the 2-D, 2.5-D and 3-D tensor modes, operation by operation.

They are those that `parallel/grid/tensor_grid.py` calls: broadcasts and reductions for SUMMA
matmuls, gathers and sums for 3-D matmuls, and those for norms, embedding and loss. Bytes are
counted as in `estimating/bytes/communication.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pentameter.config.choices import look_up
from pentameter.estimating.bytes.operation_communication import (
    OperationCommunication,
    Sent,
    recomputed_results,
)
from pentameter.planning.architecture import CollectiveKind, Operation, ParameterSpec
from pentameter.planning.buckets import MAX_LOGITS, row_chunks
from pentameter.planning.layouts.sharding import shard_size

TOKEN_BYTES = 8
NUMBERS_OF_A_NORM = {"layernorm": 2, "rmsnorm": 1}
"""Maps `model.norm` to the number of statistics per token that ranks exchange, each computed over a
rank's local channels: mean and variance, or the mean square."""


class GridCommunication(OperationCommunication):
    """OperationCommunication for grid tensor modes, with other collectives for matrices, norms and
    the embedding."""

    def _sent_by(
        self, operations: Sequence[Operation], kinds: Collection[CollectiveKind] | None
    ) -> Iterator[Sent]:
        """Yield the grid's own collectives for every operation, then those that operations list
        themselves, limited to `kinds` (by default the softmax's and attention's)."""
        how = self.step.config.train.activation_checkpoint
        # The tensors that we save are saved by an operation that has run.
        repeated = recomputed_results(operations, with_last=True) if how else set()
        for op in operations:
            yield from self._of(op, 2 if op.name in repeated else 1)
        yield from super()._sent_by(operations, kinds or ("softmax", "attend"))

    def _of(self, op: Operation, n_forward: int) -> Iterator[Sent]:
        """Yield the grid's collectives for one operation, whose forward pass runs `n_forward` times
        (2 if recomputed)."""
        match op.role:
            case "token_embedding":
                yield from self._look_up(op)
            case "norm":
                yield from self._norm(n_forward)
            case "head_norm":
                yield from self._norm_of_heads(op, n_forward)
            case "column_parallel" | "row_parallel":
                yield from self._bias(op, n_forward)
                if self.step.config.train.activation_checkpoint == "selective":
                    n_forward = 1  # the result is kept
                yield from self._matmul(op, self.n_tokens, n_forward)
            case "head":
                yield from self._bias(op, 1)
                if self.step.layout.is_3d:  # the targets for the rows whose logits this rank has
                    n_bytes = self.edge * self.n_tokens * TOKEN_BYTES
                    yield Sent("depth", "all_gather", n_bytes)
                _, width = self.step.sharding.local_shape(op.result.shape, op.result.axes)
                for rows in row_chunks(self.n_tokens, width, MAX_LOGITS):
                    yield from self._matmul(op, rows.stop - rows.start, 1)

    @property
    def edge(self) -> int:
        """The grid's side: the number of ranks along `row`, and along `tensor`."""
        return self.step.layout.sizes["tensor"]

    @property
    def n_tokens(self) -> int:
        """Tokens in a micro-batch on this rank."""
        shape = (self.step.config.model.context_length,)
        return self.step.micro_batch_size * self.step.sharding.local_shape(shape, ("context",))[0]

    @property
    def summed_bytes(self) -> int:
        """Bytes per element while ranks sum a weight's gradient: at least 4 (float32)."""
        return max(4, self.step.product_bytes)

    def _matmul(self, op: Operation, n_tokens: int, n_forward: int) -> Iterator[Sent]:
        n_out, n_in = op.parameters[0].shape
        if self.step.layout.is_3d:
            return self._matmul_3d(op, n_tokens, n_forward)
        return self._summa(n_out, n_in // self.edge, n_tokens, n_forward)

    def _summa(self, n_out: int, n_in: int, n_tokens: int, n_forward: int) -> Iterator[Sent]:
        """Yield SUMMA's collectives for a weight with shape (n_out, n_in) per grid column. Each
        pass broadcasts weight blocks; the forward pass reduces each partial result to one rank. The
        backward pass also broadcasts blocks of the result's gradient, and reduces the weight's.
        `n_forward` counts forward passes (2 if recomputed)."""
        p = self.step.product_bytes
        for coordinate in range(self.edge):
            n = shard_size(n_out, self.edge, coordinate)
            yield Sent("row", "broadcast", p * n * n_in, n_forward + 1)
            yield Sent("tensor", "reduce", p * n * n_tokens, n_forward)
            yield Sent("tensor", "broadcast", p * n * n_tokens)
            yield Sent("row", "reduce", self.summed_bytes * n * n_in)

    def _matmul_3d(self, op: Operation, n_tokens: int, n_forward: int) -> Iterator[Sent]:
        """Yield the 3-D algorithm's collectives for a matmul. Each pass all-gathers input and
        weight. The forward pass reduce-scatters the result; the backward pass all-gathers the
        result's gradient and reduce-scatters the gradients for input and weight. `n_forward` counts
        forward passes (2 if recomputed)."""
        n_out, n_in = op.parameters[0].shape
        reads_stream = op.contracts == "embed"
        inputs, results = ("depth", "tensor") if reads_stream else ("tensor", "depth")
        split, whole = (n_out, n_in) if reads_stream else (n_in, n_out)
        block = self._gathered(split) * (whole // self.edge)
        rows = self.edge * n_tokens * self.step.product_bytes
        axis = op.result.axes[1]
        (width,) = self.step.sharding.local_shape((n_out,), (axis,), self.coordinates)
        x, y = rows * (n_in // self.edge), rows * width
        yield Sent(inputs, "all_gather", x, n_forward + 1)
        yield Sent("row", "all_gather", self.step.product_bytes * block, n_forward + 1)
        yield Sent(results, "reduce_scatter", y, n_forward)
        yield Sent(results, "all_gather", y)
        yield Sent(inputs, "reduce_scatter", x)
        yield Sent("row", "reduce_scatter", self.summed_bytes * block)

    def _gathered(self, n: int) -> int:
        """Return the number of elements that a rank has after an all-gather along `row` of a
        dimension with `n` elements; shards are padded to the size of the largest."""
        layout = self.step.layout
        return shard_size(n, layout.parameter_sizes["row"], 0) * layout.sizes["row"]

    def _bias(self, op: Operation, n_forward: int) -> Iterator[Sent]:
        """Yield the collectives for an operation's bias: only in mode 3d, for a bias on an inner
        width, which is sharded as its weight is."""
        biases = [spec for spec in op.parameters if len(spec.shape) == 1]
        if self.step.layout.is_3d and biases and op.contracts == "embed":
            yield from self._gathered_vector(biases[0], n_forward)

    def _gathered_vector(self, spec: ParameterSpec, n_forward: int) -> Iterator[Sent]:
        n_bytes = self.step.element_bytes * self._gathered(*spec.shape)
        yield Sent("row", "all_gather", n_bytes, n_forward)
        yield Sent("row", "reduce_scatter", n_bytes)

    def _norm(self, n_forward: int) -> Iterator[Sent]:
        n = look_up(NUMBERS_OF_A_NORM, self.step.config.model.norm, "model.norm", "the traffic")
        n_bytes = n * self.n_tokens * self.step.summed_bytes
        if n == 1:
            yield Sent("tensor", "all_reduce", n_bytes, n_forward)
        else:
            yield Sent("tensor", "all_gather", self.edge * n_bytes, n_forward)
        yield Sent("tensor", "all_reduce", n_bytes)

    def _norm_of_heads(self, op: Operation, n_forward: int) -> Iterator[Sent]:
        """Yield the all-reduces for a norm over all heads' channels, one mean square per token. A
        norm within each head needs none."""
        (weight,) = op.parameters
        if weight.axes[0] == "head":
            return
        n_bytes = self.n_tokens * self.step.summed_bytes
        yield Sent(self.step.layout.grid_width, "all_reduce", n_bytes, n_forward + 1)
        if self.step.layout.is_3d:
            yield from self._gathered_vector(weight, n_forward)

    def _look_up(self, op: Operation) -> Iterator[Sent]:
        """Yield the embedding's collectives: token ids are all-gathered, and each rank's shard of
        the sums is reduce-scattered back, with the reverse for gradients. Mode 3d also gathers the
        table and reduce-scatters its gradient."""
        dimension = "depth" if self.step.layout.is_3d else "row"
        n_tokens, e = self.edge * self.n_tokens, self.step.element_bytes
        V, D = op.parameters[0].shape
        sums = e * n_tokens * (D // self.edge)
        yield Sent(dimension, "all_gather", n_tokens * TOKEN_BYTES)
        yield Sent(dimension, "reduce_scatter", sums)
        yield Sent(dimension, "all_gather", sums)
        if self.step.layout.is_3d:
            table = e * self._gathered(V) * (D // self.edge)
            yield Sent("row", "all_gather", table)
            yield Sent("row", "reduce_scatter", table)
