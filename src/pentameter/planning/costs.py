"""What a model's operations cost: folds over the one list of `planning/architecture.py`.

FLOPs, the times of a stage's passes, padding, and the bytes that forward passes keep for their
backward passes. The last are after Korthikanti et al. 2022 ("Reducing activation recomputation in
large transformer models"), section 4, with what our modules keep: their attention has dropout and
writes out its weights, ours by default neither.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pentameter.config.choices import look_up, refuse_unknown
from pentameter.config.schema import Config, LoraConfig, ModelConfig
from pentameter.planning.adapters import Run, run_operations
from pentameter.planning.architecture import (
    ActivationTensor,
    Operation,
    padded_vocab_size,
    parameter_table,
    residual_stream,
)
from pentameter.planning.layout import Layout
from pentameter.planning.rules import LayoutRules

BYTES = {
    "auto": (4, 4),  # where the run has not chosen yet
    "fp64": (8, 8),
    "fp32": (4, 4),
    "tf32": (4, 4),
    "bf16": (4, 2),
    "fp16": (4, 2),
}
"""`train.precision` → bytes of a weight's number, and of one that goes into a product."""
NO_ADAPTERS = LoraConfig()
RECOMPUTES_PRODUCTS = {None: False, "selective": False, "full": True}
"""`train.activation_checkpoint` → whether backward computes a block's matrix products again."""
CONVENTION = "6·N + 12·n_layers·d_model·context_length per token, full attention"

MAX_LOGITS = 2**26
"""Logits that are worth holding at once. Fewer than that in all are left to `loss_sum`, which
`torch.compile` joins with the model."""
MOST_CHUNKS = 8
"""Chunks of a micro-batch's logits, at most. Each adds V · D numbers to the weight's gradient, on
which an H100 spent 50 ms of gpt2-124m's step where there were 49 (`docs/performance.md`). An eighth
of a large micro-batch's logits is little beside its activations."""
TILE_ROWS = 128
"""Chunks are a multiple of this where that leaves them below the bound: a tile of a product."""


def row_chunks(n_rows: int, width: int, max_logits: int) -> list[slice]:
    """Rows of logits (n_rows, width) in the fewest chunks of `max_logits` numbers (or one row, or
    an eighth of all), and as even as that allows: one shape, or two, for what compiles the kernel.
    """
    most = max(1, max_logits // max(1, width), -(-n_rows // MOST_CHUNKS))
    size = -(-n_rows // max(1, -(-n_rows // most)))
    size = min(-(-size // TILE_ROWS) * TILE_ROWS, most)
    return [slice(start, min(start + size, n_rows)) for start in range(0, n_rows, max(1, size))]


@dataclass(frozen=True)
class StepSizes:
    """How one part of the data divides its step, and the bytes of its numbers."""

    n_rows: int
    """Sequences of a step."""
    micro_batch_size: int
    """Sequences of a micro-batch, which divides them."""
    element_bytes: int
    """Bytes of a weight's number, and of the residual stream's."""
    product_bytes: int
    """Bytes of a number that goes into a matrix product."""
    fused_dropout: bool = False
    """Whether kernels of a GPU drop attention's weights, and do not write them out."""

    @property
    def n_micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.n_rows // self.micro_batch_size

    def bytes_of(self, tensor: ActivationTensor) -> int:
        """Bytes of one number of an activation."""
        match tensor.dtype:
            case "weights":
                return self.element_bytes
            case "products":
                return self.product_bytes
            case "softmax":
                return max(4, self.element_bytes)
            case "float32":
                return 4
            case "bool":
                return 1


def step_sizes(
    config: Config, layout: Layout, precision: str | None = None, *, fused_dropout: bool = False
) -> StepSizes:
    """The sizes of a step of a resolved configuration; `precision` is that of the run where the
    configuration leaves it open, without which products are taken to be in full precision."""
    train = config.train
    assert train.batch_size is not None  # resolved
    assert train.micro_batch_size is not None
    precision = precision or train.precision
    element_bytes, product_bytes = look_up(BYTES, precision, "train.precision", "the planner")
    return StepSizes(
        n_rows=train.batch_size // layout.n_row_parts,
        micro_batch_size=train.micro_batch_size,
        element_bytes=element_bytes,
        product_bytes=product_bytes,
        fused_dropout=fused_dropout,
    )


# -- arithmetic -------------------------------------------------------------------------------


def flops_per_token(model: ModelConfig, lora: LoraConfig = NO_ADAPTERS) -> int:
    """Forward and backward FLOPs per trained token: 6·N + 12·n_layers·d_model·context_length.

    N counts every parameter except position embeddings, which are only added, and except the
    token embedding when the head does not share it, because a look-up multiplies nothing.
    Attention is counted in full although half of it is masked. The convention is the one of PaLM
    (Chowdhery et al. 2022, appendix B). Where adapters alone are trained, the model's parameters
    count 4 each: their gradients are not computed.
    """
    used = [op for op in run_operations(model, lora) if op.kind != "look_up"]
    multiplied = {spec for op in used for spec in op.parameters}
    n_products = sum(op.token_products for op in used)
    return 6 * n_products + sum(
        (6 if spec.is_trained else 4) * spec.n_elements for spec in multiplied
    )


class PassSeconds(NamedTuple):
    """How long the passes of a stage take, in any unit."""

    forward: float
    backward_input: float
    backward_weight: float


def pass_seconds(config: Config, stages: Sequence[range]) -> list[PassSeconds]:
    """The passes of each stage, measured in multiplications of a token, attention in full."""
    how, key = config.train.activation_checkpoint, "train.activation_checkpoint"
    recomputed = look_up(RECOMPUTES_PRODUCTS, how, key, "the timeline")
    seconds = []
    for layers in stages:
        run = run_operations(config.model, config.lora, layers)
        weights = sum(op.weight_products for op in run)
        trained = sum(op.weight_products for op in run if op.is_trained)
        activations = sum(op.token_products for op in run)
        forward = weights + activations
        # A product has two gradients; where both factors are activations, both are of its inputs.
        backward_input = weights + 2 * activations + (forward if recomputed else 0)
        seconds.append(PassSeconds(forward, backward_input, trained))
    return seconds


def end_weights(config: Config) -> tuple[float, float]:
    """The weights of embedding and head in layers, where stages are weighed by their arithmetic: an
    embedding only looks up, a head is a product with V · D weights."""
    match config.parallel.partition:
        case "uniform":
            return 0.0, 0.0
        case "weighted":
            run = run_operations(config.model, config.lora)
            first, layer, last = (
                sum(op.weight_products + op.token_products for op in part)
                for part in (
                    itertools.takewhile(lambda op: op.layer is None, run),
                    (op for op in run if op.layer == 0),
                    itertools.takewhile(lambda op: op.layer is None, reversed(run)),
                )
            )
            return first / layer, last / layer
        case unknown:
            refuse_unknown(unknown, "parallel.partition", "the planner")


def padding_elements(model: ModelConfig) -> int:
    """Elements of the embedding and head rows that only pad the vocabulary."""
    assert model.vocab_size is not None
    n_rows = padded_vocab_size(model)
    in_rows = sum(spec.n_elements for spec in parameter_table(model) if "vocab" in spec.axes)
    return in_rows // n_rows * (n_rows - model.vocab_size)


# -- activations ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of the activations of one micro-batch, in the process with the largest part of each."""

    config: Config
    layout: Layout
    sizes: StepSizes

    def of(self, tensors: Iterable[ActivationTensor]) -> int:
        """Bytes of activations, each counted once."""
        return sum(self._one(tensor) for tensor in set(tensors))

    def _one(self, tensor: ActivationTensor) -> int:
        n_rows = self.sizes.micro_batch_size
        n_elements = math.prod(self.layout.local_shape(tensor.shape, tensor.axes))
        return n_rows * n_elements * self.sizes.bytes_of(tensor)

    @property
    def stream(self) -> int:
        """Bytes of the residual stream between blocks."""
        return self._one(residual_stream(self.config.model, "stream"))

    @property
    def message(self) -> int:
        """Bytes of the stream that a process sends to the next stage."""
        stream = residual_stream(self.config.model, "message")
        return self._one(replace(stream, axes=("message", "embed")))

    def stage(self, run: Sequence[Operation]) -> int:
        """Bytes that a stage's forward pass keeps for backward, with activation checkpointing
        where it is on, which is for blocks."""
        ends = [op for op in run if op.layer is None]
        kept = self.of(tensor for op in ends for tensor in op.saves)
        return kept + sum(n * self._kept_of_block(block) for block, n in _alike_blocks(run))

    def _block(self, block: Sequence[Operation]) -> int:
        """Bytes one block keeps for backward without checkpointing: what its operations save, and
        its matrices where it rounds them for products."""
        kept = self.of(tensor for op in block for tensor in self.saves(op))
        if self.layout.exchanges_heads:  # of the result, whose other half-way form attention saves
            kept += self.of(op.result for op in block if op.kind == "attention")
        in_1d = self.layout.tensor_mode == "1d"  # else each pass rounds them anew
        come_rounded = LayoutRules(self.layout).weights_come_rounded(self.sizes.n_micro_batches)
        if self.rounds_weights and in_1d and not come_rounded:
            products = [op for op in block if op.kind == "product" and op.gives_gradient]
            kept += sum(self.rounded_weight(op) for op in products)
        return kept

    def saves(self, op: Operation) -> tuple[ActivationTensor, ...]:
        """What the backward pass of an operation reads. A ring's attention goes by blocks, and so
        do kernels that drop its weights. Matrices that read the stream at once keep the part of it
        that is here, and gather it again."""
        if op.kind == "attention" and (self._has_ring or self.sizes.fused_dropout):
            return op.saves_by_blocks
        if self._gathers_again(op):
            return tuple(replace(kept, axes=op.reads[0].axes) for kept in op.saves)
        return op.saves

    def saves_selectively(self, op: Operation) -> bool:
        """Whether `activation_checkpoint = "selective"` keeps the result of an operation: of a
        matrix product, and of attention that is one operation, which saves its own."""
        by_blocks = op.kind == "attention" and op.result in self.saves(op)
        return op.kind == "product" or by_blocks

    def _gathers_again(self, op: Operation) -> bool:
        """Whether the backward pass of a product gathers what it read, of which a part was kept."""
        reads_stream = op.kind == "product" and op.reads[0].axes[0] == "time"
        at_once = LayoutRules(self.layout).reads_at_once(self.config.lora)
        return reads_stream and at_once and self.layout.sequence

    @property
    def _has_ring(self) -> bool:
        return self.layout.context > 1 and not self.layout.exchanges_heads

    def attending(self, run: Sequence[Operation]) -> int:
        """Extra bytes while a ring's attention is differentiated, when what the block keeps after
        it is gone: its own buffers, and two gradients of the stream; 0 where there is no ring."""
        if not self._has_ring:
            return 0
        most = 0
        for block, _ in _alike_blocks(run):
            kept = self._kept_of_block(block)
            if self.config.train.activation_checkpoint is not None:
                kept -= self.stream
            for index, op in enumerate(block):
                if op.kind == "attention":
                    before = self._block(block[: index + 1])
                    most = max(most, before - kept + self._ring_buffers(op) + 2 * self.stream)
        return most

    def _ring_buffers(self, op: Operation) -> int:
        """Bytes of the backward pass of a ring's attention: keys and values at work and on their
        way, in the products' dtype; their gradients, likewise and this process's own, and that of
        the queries, as they are added up."""
        n_q, n_kv = attention_elements(op, self.layout)
        summed = max(4, self.sizes.element_bytes)
        each_row = 2 * n_kv * self.sizes.product_bytes + (3 * n_kv + n_q) * summed
        return self.sizes.micro_batch_size * each_row

    def _kept_of_block(self, block: Sequence[Operation]) -> int:
        """Bytes one block keeps for backward, with activation checkpointing where it is on."""
        match self.config.train.activation_checkpoint:
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
        """Bytes a stage keeps once its input's gradient is there and its weights' are not: the
        gradients of the results that a block's parameters had a part in."""
        return sum(
            n * self.of(op.result for op in block if op.parameters)
            for block, n in _alike_blocks(run)
        )

    def recomputing(self, run: Sequence[Operation]) -> int:
        """Extra bytes while a block is computed again: what was not kept of it, and the gradients
        of the activation function's input and output and of the stream."""
        if self.config.train.activation_checkpoint is None:
            return 0
        return max(
            self._block(block)
            - (self._kept_of_block(block) - self.stream)
            + self.of(
                tensor
                for op in block
                if op.kind == "activation"
                for tensor in (*op.reads, op.result)
            )
            + 2 * self.stream
            for block, _ in _alike_blocks(run)
        )

    def loss(self, run: Sequence[Operation]) -> int:
        """Extra bytes while the loss is computed: logits as probabilities with two gradients of
        theirs, or the chunk of them at hand, and the weight and its gradient where they are
        rounded for it; 0 in a stage without the head."""
        return max((self._loss(op) for op in run if op.kind == "head"), default=0)

    def _loss(self, head: Operation) -> int:
        e, p = self.sizes.element_bytes, self.sizes.product_bytes
        rounded = 2 * self.rounded_weight(head) if self.rounds_weights else 0
        whole_width = head.result.shape[1]
        T, width = self.layout.local_shape(head.result.shape, head.result.axes)
        n_tokens = self.sizes.micro_batch_size * T
        if width == whole_width and n_tokens * width <= MAX_LOGITS:
            return rounded + 3 * max(4, e) * n_tokens * width
        n_rows = row_chunks(n_tokens, width, MAX_LOGITS)[0].stop
        logits = n_rows * width * (p if p == e else p + 4)
        return rounded + logits + self.of(head.saves) + self._blocks_of_product(head, n_rows)

    def multiplying(self, run: Sequence[Operation]) -> int:
        """Extra bytes while a product in a block is differentiated, where processes share it."""
        n_tokens = self.sizes.micro_batch_size * self.config.model.context_length
        n_tokens = self.layout.local_shape((n_tokens,), ("context",))[0]
        products = (op for op in run if op.kind == "product")
        return max((self._blocks_of_product(op, n_tokens) for op in products), default=0)

    def _blocks_of_product(self, op: Operation, n_tokens: int) -> int:
        """Bytes of others' blocks in the backward pass of a product of so many tokens. Where time
        is divided: what was read, gathered again, its gradient, and others' parts of that. Of SUMMA
        two of the weight and of the result's gradient, and a sum for another process. In three
        dimensions inputs, weight and gradients as they are gathered."""
        mode, weight = self.layout.tensor_mode, op.parameters[0]
        p, summed = self.sizes.product_bytes, max(4, self.sizes.product_bytes)
        if mode == "1d":
            return 3 * p * n_tokens * op.reads[0].shape[1] if self._gathers_again(op) else 0
        n_in, n_out = (
            self.layout.local_shape(tensor.shape, tensor.axes)[1]
            for tensor in (*op.reads, op.result)
        )
        if mode == "3d":
            rows = self.layout.sizes["row"] * n_tokens
            return p * rows * (n_in + n_out) + (p + summed) * n_in * n_out
        n_block = math.prod(self.layout.parameter_shape(weight.shape, weight.axes))
        return (2 * p + summed) * n_block + 2 * p * n_tokens * n_out

    @property
    def rounds_weights(self) -> bool:
        """Whether products read weights in a narrower dtype than they are held in."""
        return self.sizes.product_bytes < self.sizes.element_bytes

    def rounded_weight(self, op: Operation) -> int:
        """Bytes of an operation's matrix, as products read it."""
        weight = op.parameters[0]
        n_elements = math.prod(self.layout.parameter_shape(weight.shape, weight.axes))
        return self.sizes.product_bytes * n_elements


def attention_elements(
    op: Operation, layout: Layout, places: Mapping[str, int] | None = None
) -> tuple[int, int]:
    """Numbers of the queries, and of the keys and values, of a sequence that a process has."""
    n_q = math.prod(layout.local_shape(op.result.shape, op.result.axes, places))
    n_read = sum(math.prod(layout.local_shape(each.shape, each.axes, places)) for each in op.reads)
    return n_q, n_read - n_q


def _alike_blocks(run: Sequence[Operation]) -> list[tuple[list[Operation], int]]:
    """A block of each kind, and how many there are."""
    return (run if isinstance(run, Run) else Run(run)).alike_blocks
