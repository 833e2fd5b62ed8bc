"""Counts that time and memory estimates are built on, from the model's list of operations.

Matmul counts per pipeline stage, and the activation bytes that forward passes save for their
backward passes. The latter follow Korthikanti et al. 2022 ("Reducing activation recomputation in
large transformer models"), section 4, adapted to our modules: their attention has dropout and
writes out its weights; ours by default does neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pentameter.config.choices import (
    DTYPE_BYTES,
    PRECISIONS,
    STREAMS,
    NumberFormats,
    look_up,
    refuse_unknown,
)
from pentameter.config.schema import Config
from pentameter.estimating.seconds.cluster import trained_precision
from pentameter.planning.adapters import Run, run_operations
from pentameter.planning.architecture import ActivationTensor, Operation, residual_stream
from pentameter.planning.buckets import MAX_LOGITS, row_chunks
from pentameter.planning.layouts.layout import Layout
from pentameter.planning.layouts.sharding import Sharding, sharding_of
from pentameter.planning.rules import LayoutRules

RECOMPUTES_PRODUCTS = {None: False, "selective": False, "full": True}
"""Maps `train.activation_checkpoint` to whether the backward pass recomputes a block's matmuls."""


@dataclass(frozen=True)
class Step:
    """One optimizer step, for estimates: the resolved configuration, its layout and the precision.
    A frozen record."""

    config: Config
    layout: Layout
    stages: Sequence[range] = ()
    """The range of layers in each pipeline stage."""
    asked_precision: str | None = None
    """The matmul precision, in place of `train.precision`. If None, that is taken, or fp32 if it is
    `auto`."""
    drops_by_blocks: bool = False
    """Whether GPU kernels apply dropout to attention weights without writing them out."""
    imbalance: float = 1.0
    """An assumption about the router: the most rows that a rank's experts get in a layer ÷ the mean
    over the ranks that exchange rows. 1 if all get equally many."""

    @cached_property
    def sharding(self) -> Sharding:
        """Each parameter's and activation's placement on the mesh."""
        return sharding_of(self.layout, self.config.model)

    @cached_property
    def rules(self) -> LayoutRules:
        """The rules by which this layout gathers weights and reduces gradients, such as whether it
        does so for each micro-batch."""
        return LayoutRules(self.layout)

    @cached_property
    def n_rows(self) -> int:
        """Sequences per step on each data-parallel rank: `train.batch_size` ÷
        `layout.n_batch_shards`."""
        assert self.config.train.batch_size is not None  # resolved
        return self.config.train.batch_size // self.layout.n_batch_shards

    @cached_property
    def micro_batch_size(self) -> int:
        """Sequences in one forward pass on each data-parallel rank: `train.micro_batch_size`, which
        divides `n_rows`, the rank's sequences per step."""
        assert self.config.train.micro_batch_size is not None  # resolved
        return self.config.train.micro_batch_size

    @cached_property
    def n_micro_batches(self) -> int:
        """Micro-batches per step on each data-parallel rank."""
        return self.n_rows // self.micro_batch_size

    @property
    def precision(self) -> str:
        """The precision that matmuls are counted in: `asked_precision` if it is set, else
        `train.precision`; fp32 in place of `auto`."""
        precision = self.asked_precision or self.config.train.precision
        return "fp32" if precision == "auto" else precision

    @cached_property
    def _numbers(self) -> NumberFormats:
        precision = trained_precision(self.precision)
        return look_up(PRECISIONS, precision, "train.precision", "the planner")

    @cached_property
    def element_bytes(self) -> int:
        """Bytes per element in weights."""
        return DTYPE_BYTES[self._numbers.weights]

    @cached_property
    def stream_bytes(self) -> int:
        """Bytes per element in the residual stream."""
        narrow = look_up(STREAMS, self.config.train.stream, "train.stream", "the planner")
        return DTYPE_BYTES[narrow or self._numbers.weights]

    @cached_property
    def product_bytes(self) -> int:
        """Bytes per element that enters a matmul."""
        return DTYPE_BYTES[self._numbers.products]

    @property
    def summed_bytes(self) -> int:
        """Bytes per element in a softmax or in a sum over blocks: at least 4 (float32)."""
        return max(4, self.element_bytes)

    @property
    def rounds_weights(self) -> bool:
        """Whether matmuls read weights in a narrower dtype than they are stored in."""
        return self.product_bytes < self.element_bytes

    def local_shape(self, tensor: ActivationTensor) -> tuple[int, int]:
        """Return an activation's (tokens, numbers per token) for one sequence, on the rank that has
        the most of it. Rows sent to experts are multiplied by `rows_over_mean`."""
        n_tokens, width = self.sharding.local_shape(tensor.shape, tensor.axes)
        if tensor.axes[0] == "received":
            n_tokens = math.ceil(n_tokens * self.rows_over_mean)
        return n_tokens, width

    @property
    def rows_over_mean(self) -> float:
        """Ratio of what the fullest rank's experts receive to the mean over ranks, as a factor on
        the number of rows: `imbalance`, but at most the number of ranks that hold different
        experts."""
        return min(self.imbalance, self.layout.expert)

    def bytes_of(self, tensor: ActivationTensor) -> int:
        """Return the number of bytes of one element of an activation, which follows from its
        dtype."""
        match tensor.dtype:
            case "weights":
                return self.element_bytes
            case "stream":
                return self.stream_bytes
            case "products":
                return self.product_bytes
            case "softmax":
                return self.summed_bytes
            case "float32":
                return 4
            case "bool":
                return 1


# -- arithmetic -------------------------------------------------------------------------------


class PassSeconds(NamedTuple):
    """Durations of the forward pass and of the two parts of the backward pass (gradients for
    inputs, gradients for weights), in seconds or any other unit."""

    forward: float
    backward_input: float
    backward_weight: float


def pass_seconds(step: Step) -> list[PassSeconds]:
    """Return, for each stage, a PassSeconds in multiplications per token instead of seconds, so
    that no cluster is needed. Attention is counted in full, without skipping masked positions;
    recomputation counts as part of the backward pass."""
    config = step.config
    how, key = config.train.activation_checkpoint, "train.activation_checkpoint"
    recomputed = look_up(RECOMPUTES_PRODUCTS, how, key, "the timeline")
    seconds = []
    for layers in step.stages:
        run = run_operations(config.model, config.lora, layers)
        weights = sum(op.weight_products for op in run)
        trained = sum(op.weight_products for op in run if op.is_trained)
        activations = sum(op.token_products for op in run)
        forward = weights + activations
        # A matmul has two gradients; with two activations as factors, both count as inputs'
        # gradients. Nothing that is trained may come before it.
        backward_input = sum(
            op.weight_products + 2 * op.token_products for op in run if op.gives_gradient
        )
        backward_input += forward if recomputed else 0
        seconds.append(PassSeconds(forward, backward_input, trained))
    return seconds


# -- activations ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationBytes:
    """Estimates the bytes of activations in one micro-batch, on the rank that has the largest shard
    of each tensor. The argument `run` of its methods is a stage's operations in the order in which
    they are computed."""

    step: Step

    def of(self, tensors: Iterable[ActivationTensor]) -> int:
        """Return the total bytes for these activations in one micro-batch on the rank; equal ones
        are counted once."""
        return sum(self._one(tensor) for tensor in set(tensors))

    def _one(self, tensor: ActivationTensor) -> int:
        n_rows = self.step.micro_batch_size
        n_elements = math.prod(self.step.local_shape(tensor))
        return n_rows * n_elements * self.step.bytes_of(tensor)

    @property
    def stream(self) -> int:
        """Bytes of the residual stream between two blocks."""
        return self._one(residual_stream(self.step.config.model, "stream"))

    @property
    def message(self) -> int:
        """Bytes that one rank sends to the next pipeline stage for one micro-batch: its block of
        the residual stream."""
        stream = residual_stream(self.step.config.model, "message")
        return self._one(replace(stream, axes=("message", "embed")))

    def stage(self, run: Sequence[Operation]) -> int:
        """Return the bytes that a stage's forward pass saves for the backward pass, after any
        activation checkpointing of its blocks."""
        ends = [op for op in run if op.layer is None]
        kept = self.of(tensor for op in ends for tensor in op.saves)
        return kept + sum(n * self.kept_of_block(block) for block, n in _alike_blocks(run))

    def _block(self, block: Sequence[Operation]) -> int:
        """Return the bytes that one block saves for the backward pass without checkpointing: its
        operations' saved tensors, and its matrices if it rounds them for matmuls."""
        kept = self.of(tensor for op in block for tensor in self.saves(op))
        if self.step.layout.exchanges_heads:  # its result; attention saves it exchanged
            kept += self.of(op.result for op in block if op.kind == "attention")
        in_1d = not self.step.layout.is_grid  # else each pass rounds them again
        come_rounded = self.step.rules.weights_come_rounded(self.step.n_micro_batches)
        if self.step.rounds_weights and in_1d and not come_rounded:
            products = [op for op in block if op.kind == "product" and op.gives_gradient]
            kept += sum(self.rounded_weight(op) for op in products)
        return kept

    def saves(self, op: Operation) -> tuple[ActivationTensor, ...]:
        """Return the tensors that an operation saves for its backward pass. Ring attention and
        attention kernels with dropout work by blocks and save fewer. Column-parallel matrices that
        run as one operation save only this rank's input shard, and gather it again."""
        if op.kind == "attention" and (self.step.layout.has_ring or self.step.drops_by_blocks):
            return op.saves_by_blocks
        if self._gathers_again(op):
            return tuple(replace(kept, axes=op.reads[0].axes) for kept in op.saves)
        return op.saves

    def saves_selectively(self, op: Operation) -> bool:
        """Whether `activation_checkpoint = "selective"` keeps an operation's result: yes for
        matmuls, and for attention that runs as one operation and saves its result."""
        by_blocks = op.kind == "attention" and op.result in self.saves(op)
        return op.kind == "product" or by_blocks

    def _gathers_again(self, op: Operation) -> bool:
        """True if the backward pass of a matmul all-gathers its input again, because the forward
        pass saved only this rank's sequence shard of it. That is so with sequence parallelism, for
        column-parallel matmuls that are computed together with others of the same input
        (`rules.reads_at_once`)."""
        reads_stream = op.kind == "product" and op.reads[0].axes[0] == "time"
        at_once = self.step.rules.reads_at_once(self.step.config.lora)
        return reads_stream and at_once and self.step.layout.sequence

    def attending(self, run: Sequence[Operation]) -> int:
        """Return how many more bytes are held at the peak of ring attention's backward pass than
        the block saves: its buffers, and two gradients of the residual stream, when tensors of
        later operations are freed. 0 without ring attention."""
        if not self.step.layout.has_ring:
            return 0
        most = 0
        for block, _ in _alike_blocks(run):
            kept = self.kept_of_block(block)
            if self.step.config.train.activation_checkpoint is not None:
                kept -= self.stream
            for index, op in enumerate(block):
                if op.kind == "attention":
                    before = self._block(block[: index + 1])
                    most = max(most, before - kept + self._ring_buffers(op) + 2 * self.stream)
        return most

    def _ring_buffers(self, op: Operation) -> int:
        """Return the bytes of buffers in ring attention's backward pass: keys and values in use and
        in flight, in the matmul dtype; their gradients, in use, in flight and this rank's own, and
        the queries' gradient, in the accumulation dtype."""
        n_q, n_kv = attention_elements(op, self.step.sharding)
        summed = self.step.summed_bytes
        each_row = 2 * n_kv * self.step.product_bytes + (3 * n_kv + n_q) * summed
        return self.step.micro_batch_size * each_row

    def kept_of_block(self, block: Sequence[Operation]) -> int:
        """Return the bytes that one block saves for the backward pass, after any activation
        checkpointing."""
        match self.step.config.train.activation_checkpoint:
            case None:
                return self._block(block)
            case "full":
                return self.stream
            case "selective":
                return self.stream + self.of(
                    op.result for op in block if self.saves_selectively(op)
                )
            case unknown:
                refuse_unknown(unknown, "train.activation_checkpoint", "the planner's memory")

    def between_backward_halves(self, run: Sequence[Operation]) -> int:
        """Return the bytes that a stage holds between the two halves of a split backward pass
        (first the gradient of the input, later those of the weights): the gradients of all results
        that its parameters were used to compute."""
        return sum(
            n * self.of(op.result for op in block if op.parameters)
            for block, n in _alike_blocks(run)
        )

    def recomputing(self, run: Sequence[Operation]) -> int:
        """Return the extra bytes while one block is recomputed: its tensors that were not saved,
        and the gradients for the activation function's input and output and for the stream. 0
        without activation checkpointing."""
        if self.step.config.train.activation_checkpoint is None:
            return 0
        most = 0
        for block, _ in _alike_blocks(run):
            anew = self._block(block) - (self.kept_of_block(block) - self.stream)
            activations = [op for op in block if op.kind == "activation"]
            gradients = self.of(x for op in activations for x in (*op.reads, op.result))
            most = max(most, anew + gradients + 2 * self.stream)
        return most

    def loss(self, run: Sequence[Operation]) -> int:
        """Return the extra bytes while the loss is computed: the logits as probabilities with two
        gradients, or only one chunk of them, and a rounded head weight with its gradient; 0 in a
        stage without the head."""
        return max((self._loss(op) for op in run if op.kind == "head"), default=0)

    def _loss(self, head: Operation) -> int:
        e, p = self.step.element_bytes, self.step.product_bytes
        rounded = 2 * self.rounded_weight(head) if self.step.rounds_weights else 0
        whole_width = head.result.shape[1]
        T, width = self.step.sharding.local_shape(head.result.shape, head.result.axes)
        n_tokens = self.step.micro_batch_size * T
        if width == whole_width and n_tokens * width <= MAX_LOGITS:
            return rounded + 3 * self.step.summed_bytes * n_tokens * width
        n_rows = row_chunks(n_tokens, width, MAX_LOGITS)[0].stop
        logits = n_rows * width * (p if p == e else p + 4)
        return rounded + logits + self.of(head.saves) + self._matmul_blocks(head, n_rows)

    def multiplying(self, run: Sequence[Operation]) -> int:
        """Return the most extra bytes that a matmul of a block takes during its backward pass for
        blocks from other ranks. There are some in a grid of ranks (2d, 2.5d, 3d), and with sequence
        parallelism if inputs are gathered again; 0 otherwise."""
        n_tokens = self.step.micro_batch_size * self.step.config.model.context_length
        n_tokens = self.step.sharding.local_shape((n_tokens,), ("context",))[0]
        products = [op for op in run if op.kind == "product"]
        blocks = [self._matmul_blocks(op, n_tokens) for op in products]
        return max(0, *blocks, *map(self._exchanged, products))

    def _exchanged(self, op: Operation) -> int:
        """Return the bytes of rows that experts' ranks exchange, as they are sent and as they
        arrive, beyond the rows that a matmul of experts saves. 0 if every rank has all experts."""
        if not self.step.layout.shards_experts:
            return 0
        exchanges = {each.kind for each in op.collectives}
        received = {"dispatch": op.reads, "combine": (op.result,)}
        return 2 * sum(
            self.of(received[kind]) for kind in ("dispatch", "combine") if kind in exchanges
        )

    def _matmul_blocks(self, op: Operation, n_tokens: int) -> int:
        """Return the bytes for other ranks' blocks in a matmul's backward pass with `n_tokens`
        tokens; 0 in tensor mode 1d unless the input is gathered again.

        With sequence parallelism: the input gathered again, its gradient, and other ranks' partial
        results. SUMMA: two blocks each from the weight and from the result's gradient, and a sum
        for another rank. Mode 3d: gathered inputs, weight and gradients.
        """
        layout, weight = self.step.layout, op.parameters[0]
        p, summed = self.step.product_bytes, max(4, self.step.product_bytes)
        if not layout.is_grid:
            return 3 * p * n_tokens * op.reads[0].shape[1] if self._gathers_again(op) else 0
        n_in, n_out = (
            self.step.sharding.local_shape(tensor.shape, tensor.axes)[1]
            for tensor in (*op.reads, op.result)
        )
        if layout.is_3d:
            rows = layout.sizes["row"] * n_tokens
            return p * rows * (n_in + n_out) + (p + summed) * n_in * n_out
        n_block = math.prod(self.step.sharding.parameter_shape(weight))
        return (2 * p + summed) * n_block + 2 * p * n_tokens * n_out

    def rounded_weight(self, op: Operation) -> int:
        """Return the bytes of an operation's weight matrix in the matmul dtype, on this rank."""
        weight = op.parameters[0]
        n_elements = math.prod(self.step.sharding.parameter_shape(weight))
        return self.step.product_bytes * n_elements


def attention_elements(
    op: Operation, sharding: Sharding, coordinates: Mapping[str, int] | None = None
) -> tuple[int, int]:
    """Return (elements in queries, elements in keys and values) that a rank has per sequence.
    `coordinates` is the rank's position on the mesh; None means the largest shard."""
    n_q = math.prod(sharding.local_shape(op.result.shape, op.result.axes, coordinates))
    n_read = sum(
        math.prod(sharding.local_shape(each.shape, each.axes, coordinates)) for each in op.reads
    )
    return n_q, n_read - n_q


def _alike_blocks(run: Sequence[Operation]) -> list[tuple[list[Operation], int]]:
    """Group the blocks of a stage, whose operations are `run`, by kind. Return for each kind (the
    operations of one such block, the number of such blocks)."""
    return (run if isinstance(run, Run) else Run(run)).alike_blocks
