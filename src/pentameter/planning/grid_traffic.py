"""Collectives of one micro-batch in tensor modes of several dimensions, operation by operation.

They are those that `parallel/tensor_grid.py` names: SUMMA's broadcasts and reductions, the gathers
and sums of the 3-D algorithm, those of norms, embedding and loss. Bytes are counted as in
`planning/traffic.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pentameter.config.choices import look_up
from pentameter.config.schema import Config
from pentameter.planning.architecture import Operation, ParameterSpec
from pentameter.planning.costs import MAX_LOGITS, StepSizes, row_chunks
from pentameter.planning.layout import Layout, part_size

TOKEN_BYTES = 8
NUMBERS_OF_A_NORM = {"layernorm": 2, "rmsnorm": 1}
"""`model.norm` → what each process knows of a token's channels: mean and variance, or one."""


class Collective(NamedTuple):
    """Calls of a collective along a dimension of the mesh."""

    dimension: str
    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
    n_bytes: int
    calls: int = 1


@dataclass(frozen=True)
class GridTraffic:
    """The collectives of the process at `places` of the mesh, in one micro-batch."""

    config: Config
    layout: Layout
    sizes: StepSizes
    places: Mapping[str, int]
    repeated: Collection[str]
    """Operations that activation checkpointing computes again."""

    def of(self, op: Operation) -> Iterator[Collective]:
        """The collectives of an operation's passes."""
        n_forward = 2 if op.name in self.repeated else 1
        match op.kind:
            case "look_up" if op.contracts == "vocab":
                yield from self._look_up(op)
            case "norm":
                if op.result.axes[1] == "embed":
                    yield from self._norm(n_forward)
                else:
                    yield from self._norm_of_heads(op, n_forward)
            case "product":
                yield from self._bias(op, n_forward)
                if self.config.train.activation_checkpoint == "selective":
                    n_forward = 1  # whose result is kept
                yield from self._product(op, self.n_tokens, n_forward)
            case "head":
                yield from self._bias(op, 1)
                if self.is_3d:  # the targets of the rows whose logits are here
                    n_bytes = self.edge * self.n_tokens * TOKEN_BYTES
                    yield Collective("depth", "all_gather", n_bytes)
                _, width = self.layout.local_shape(op.result.shape, op.result.axes)
                for rows in row_chunks(self.n_tokens, width, MAX_LOGITS):
                    yield from self._product(op, rows.stop - rows.start, 1)

    @property
    def is_3d(self) -> bool:
        """Whether the mode has three dimensions."""
        return self.layout.tensor_mode == "3d"

    @property
    def edge(self) -> int:
        """Processes along `row`, and along `tensor`."""
        return self.layout.sizes["tensor"]

    @property
    def n_tokens(self) -> int:
        """Tokens of a micro-batch that are here."""
        shape = (self.config.model.context_length,)
        return self.sizes.micro_batch_size * self.layout.local_shape(shape, ("context",))[0]

    @property
    def summed_bytes(self) -> int:
        """Bytes of a number of a weight's gradient while it is summed."""
        return max(4, self.sizes.product_bytes)

    def _product(self, op: Operation, n_tokens: int, n_forward: int) -> Iterator[Collective]:
        n_out, n_in = op.parameters[0].shape
        if self.is_3d:
            return self._product_3d(op, n_tokens, n_forward)
        return self._summa(n_out, n_in // self.edge, n_tokens, n_forward)

    def _summa(self, n_out: int, n_in: int, n_tokens: int, n_forward: int) -> Iterator[Collective]:
        """Blocks of a weight (n_out, n_in of this column): broadcast in each pass, as are those of
        the result's gradient, and the sums that go to one process each."""
        p = self.sizes.product_bytes
        for place in range(self.edge):
            n = part_size(n_out, self.edge, place)
            yield Collective("row", "broadcast", p * n * n_in, n_forward + 1)
            yield Collective("tensor", "reduce", p * n * n_tokens, n_forward)
            yield Collective("tensor", "broadcast", p * n * n_tokens)
            yield Collective("row", "reduce", self.summed_bytes * n * n_in)

    def _product_3d(self, op: Operation, n_tokens: int, n_forward: int) -> Iterator[Collective]:
        """Inputs and weight gathered in each pass, results and all three gradients summed."""
        n_out, n_in = op.parameters[0].shape
        reads_stream = op.contracts == "embed"
        inputs, results = ("depth", "tensor") if reads_stream else ("tensor", "depth")
        cut, whole = (n_out, n_in) if reads_stream else (n_in, n_out)
        block = self._gathered(cut) * (whole // self.edge)
        rows = self.edge * n_tokens * self.sizes.product_bytes
        axis = op.result.axes[1]
        (width,) = self.layout.local_shape((n_out,), (axis,), self.places)
        x, y = rows * (n_in // self.edge), rows * width
        yield Collective(inputs, "all_gather", x, n_forward + 1)
        yield Collective("row", "all_gather", self.sizes.product_bytes * block, n_forward + 1)
        yield Collective(results, "reduce_scatter", y, n_forward)
        yield Collective(results, "all_gather", y)
        yield Collective(inputs, "reduce_scatter", x)
        yield Collective("row", "reduce_scatter", self.summed_bytes * block)

    def _gathered(self, n: int) -> int:
        """Numbers that are gathered along `row` to have a process's n, padded to the largest."""
        return part_size(n, self.layout.parameter_sizes["row"], 0) * self.layout.sizes["row"]

    def _bias(self, op: Operation, n_forward: int) -> Iterator[Collective]:
        """In three dimensions the bias of what is between two products is divided as its weight."""
        biases = [spec for spec in op.parameters if len(spec.shape) == 1]
        if self.is_3d and biases and op.contracts == "embed":
            yield from self._gathered_vector(biases[0], n_forward)

    def _gathered_vector(self, spec: ParameterSpec, n_forward: int) -> Iterator[Collective]:
        n_bytes = self.sizes.element_bytes * self._gathered(*spec.shape)
        yield Collective("row", "all_gather", n_bytes, n_forward)
        yield Collective("row", "reduce_scatter", n_bytes)

    def _norm(self, n_forward: int) -> Iterator[Collective]:
        n = look_up(NUMBERS_OF_A_NORM, self.config.model.norm, "model.norm", "the traffic")
        n_bytes = n * self.n_tokens * max(4, self.sizes.element_bytes)
        if n == 1:
            yield Collective("tensor", "all_reduce", n_bytes, n_forward)
        else:
            yield Collective("tensor", "all_gather", self.edge * n_bytes, n_forward)
        yield Collective("tensor", "all_reduce", n_bytes)

    def _norm_of_heads(self, op: Operation, n_forward: int) -> Iterator[Collective]:
        """A mean square of all heads' channels for each token, nothing of one head's."""
        (weight,) = op.parameters
        if weight.axes[0] == "head":
            return
        n_bytes = self.n_tokens * max(4, self.sizes.element_bytes)
        yield Collective("depth" if self.is_3d else "tensor", "all_reduce", n_bytes, n_forward + 1)
        if self.is_3d:
            yield from self._gathered_vector(weight, n_forward)

    def _look_up(self, op: Operation) -> Iterator[Collective]:
        """All tokens of a group to each process, and its part of the sums for its own ones back."""
        dimension = "depth" if self.is_3d else "row"
        n_tokens, e = self.edge * self.n_tokens, self.sizes.element_bytes
        V, D = op.parameters[0].shape
        sums = e * n_tokens * (D // self.edge)
        yield Collective(dimension, "all_gather", n_tokens * TOKEN_BYTES)
        yield Collective(dimension, "reduce_scatter", sums)
        yield Collective(dimension, "all_gather", sums)
        if self.is_3d:
            table = e * self._gathered(V) * (D // self.edge)
            yield Collective("row", "all_gather", table)
            yield Collective("row", "reduce_scatter", table)
