"""The time that a model's operations take on a device: a roofline for each of them.

A matrix product is cut into tiles that the device's processors take in waves; it takes as long as
its arithmetic or its bytes, whichever is longer. Attention is its two products, of which a causal
one computes half. Everything else moves bytes. The shares of the published figures that are reached
are the cluster's `Calibration`; no other constant is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from pentameter.config.choices import look_up
from pentameter.config.schema import Config, LoraConfig, ModelConfig
from pentameter.planning.adapters import run_operations
from pentameter.planning.architecture import ActivationTensor, Operation, ParameterSpec
from pentameter.planning.cluster import Cluster, ProductShares
from pentameter.planning.costs import (
    RECOMPUTES_PRODUCTS,
    ActivationBytes,
    PassSeconds,
    StepSizes,
)
from pentameter.planning.fused_step import fused_obstacle, fuses_dropout
from pentameter.planning.layout import Layout
from pentameter.planning.layout_checks import may_compile
from pentameter.planning.rules import LayoutRules

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.6))
"""Rows and columns of a product's tiles, and the speed of each size relative to the largest, which
reads least for what it computes (CUTLASS's usual tiles; the best of a shape is taken)."""
TILE_FILL = 128
"""Depth of a product that takes as long as filling a tile's pipeline and writing its result."""
SOFTMAX_CHANNELS = 16
"""Channels of a head whose products take as long as the softmax between them."""
ATTENTION_FILL = 256
"""Context length at which half of fused attention is spent on blocks that are filled in part."""


HASH_OPERATIONS = 14
"""Operations on 32-bit words that make an element's random bits (`keyed.bits`)."""
DROPPING_BACKWARD = 7 / 5
"""Products of the backward pass in kernels that drop weights ÷ those of a fused one without: two of
them make scores and their gradients each (`model/dropout_kernels.py`)."""
WORDS_PER_FLOP = 1 / 4
"""Operations on 32-bit words of a GPU ÷ its fp32 FLOPs outside of matrix units: it has half as many
units for the former, and the latter count multiplication and addition."""
ROTATION_PASSES = (12, 16)
"""How often a rotation reads or writes each number as float32, forward and backward, where its
operations are not joined."""

NORM_PASSES = {False: (2, 3), True: (7, 12)}
"""How often a norm reads or writes the stream, forward and backward: in one operation, in steps."""


class Kind(NamedTuple):
    """Operations of a slice that take the same time: one of them, and how many there are."""

    op: Operation
    key: str
    """Equal for equal shapes, whatever the slice."""
    runs_again: bool
    """Whether full activation checkpointing computes them again: in a block, all before the last
    operation that saves something, whose result no backward pass reads."""
    n: int


@lru_cache(maxsize=4096)
def kinds_of_operations(model: ModelConfig, lora: LoraConfig, layers: range) -> tuple[Kind, ...]:
    """The operations of a slice of a run, those of equal shapes together."""
    found: dict[str, Kind] = {}
    run = run_operations(model, lora, layers)
    last_saving = {op.layer: index for index, op in enumerate(run) if op.saves}
    for index, op in enumerate(run):
        shapes = tuple((each.shape, each.axes, each.dtype) for each in (*op.reads, op.result))
        again = op.layer is not None and index < last_saving[op.layer]
        costs = (op.token_products, op.contracts, len(op.saves), op.is_trained, op.gives_gradient)
        key = repr((op.kind, shapes, *costs, again))
        n = found[key].n + 1 if key in found else 1
        found[key] = Kind(op, key, again, n)
    return tuple(found.values())


def product_seconds(
    cluster: Cluster, shares: ProductShares, peak: float, m: int, n: int, k: int, width: int
) -> float:
    """Time of a product (m, k) × (k, n) of numbers of `width` bytes on devices of a peak, in
    FLOP/s, of which products reach a share."""
    device, peak = cluster.device, peak * shares.product_share
    if device.units == 1:
        arithmetic = 2 * m * n * k / peak
    else:
        arithmetic = min(
            _waves(m, n, rows, columns, device.units)
            * (2 * rows * columns * (k + TILE_FILL) * device.units / (peak * speed))
            for rows, columns, speed in TILES
        )
    moved = width * (m * k + k * n + m * n) / cluster.memory_bandwidth
    return max(arithmetic, moved) + shares.kernel_seconds


def _waves(m: int, n: int, rows: int, columns: int, units: int) -> float:
    """Turns in which the units compute all tiles; in part, from the first turn on, as libraries
    split the depth of the last tiles."""
    turns = -(-m // rows) * -(-n // columns) / units
    whole = math.ceil(turns)
    return whole if whole == 1 else (turns + whole) / 2


class ComputeTime:
    """The passes of one micro-batch through a process's stages, in seconds."""

    def __init__(
        self, config: Config, layout: Layout, sizes: StepSizes, cluster: Cluster, precision: str
    ) -> None:
        self.config = config
        self.layout = layout
        self.sizes = sizes
        self.cluster = cluster
        self.precision = precision
        fused = fuses_dropout(config.model, layout, precision, cluster.device)
        self.bytes = ActivationBytes(config, layout, replace(sizes, fused_dropout=fused))
        rules = LayoutRules(layout)
        self.adds_whole = sizes.n_micro_batches > 1 and not rules.reduces_each_micro_batch
        self.weights_come_rounded = rules.weights_come_rounded(sizes.n_micro_batches)
        self.joins = may_compile(layout, config.train)
        """Whether operations on single elements that follow one another are one, as compiling makes
        them; else each reads what the one before has written."""
        calibration = cluster.device.calibration
        is_fused = self.joins and fused_obstacle(config, layout) is None
        self.joins_activations = is_fused and precision in calibration.fused
        """Whether activation functions are computed within the products beside them, and dropout of
        attention's weights within attention."""
        self.shares = calibration.products(precision, fused=is_fused)
        self.peak = cluster.peak_flops(precision, config.train.matmul_precision)
        how = config.train.activation_checkpoint
        self.checkpoint = how
        self.recomputes_products = look_up(
            RECOMPUTES_PRODUCTS, how, "train.activation_checkpoint", "the planner's times"
        )
        self._known: dict[str, PassSeconds] = {}
        self._stages: dict[object, PassSeconds] = {}
        self._slices: dict[range, PassSeconds] = {}
        self._reading: dict[range, PassSeconds] = {}

    @property
    def key(self) -> object:
        """Equal where the times of equal layers are, of one model, cluster and precision."""
        layout, train = self.layout, self.config.train
        return (
            layout.tensor, layout.sequence, layout.context, layout.zero > 0, self.joins,
            train.micro_batch_size, train.activation_checkpoint, self.adds_whole,
            self.weights_come_rounded, self.joins_activations, self.bytes.sizes.fused_dropout,
        )  # fmt: skip

    def stage(self, layers: range) -> PassSeconds:
        """The passes of a stage; stages of as many alike layers take the same time."""
        if layers not in self._slices:
            self._slices[layers] = self._slice(layers)
        return self._slices[layers]

    def _slice(self, layers: range) -> PassSeconds:
        kinds = kinds_of_operations(self.config.model, self.config.lora, layers)
        same = tuple((kind.key, kind.n) for kind in kinds)
        if same not in self._stages:
            self._stages[same] = self._stage(kinds)
        return self._stages[same]

    def _stage(self, kinds: Sequence[Kind]) -> PassSeconds:
        forward = backward_input = backward_weight = 0.0
        for kind in kinds:
            one = self.operation(kind)
            forward += kind.n * one.forward
            backward_input += kind.n * one.backward_input
            backward_weight += kind.n * one.backward_weight
            if kind.runs_again and self.computes_again(kind.op):
                backward_input += kind.n * one.forward
        return PassSeconds(forward, backward_input, backward_weight)

    def attention(self, layers: range) -> float:
        """The attention of a stage in both passes, under which a ring's messages travel."""
        return sum(
            kind.n * sum(self.operation(kind))
            for kind in kinds_of_operations(self.config.model, self.config.lora, layers)
            if kind.op.kind == "attention"
        )

    def reading(self, layers: range) -> PassSeconds:
        """The matrices of a stage that read the stream, beside whose gradients they may send."""
        if layers not in self._reading:
            one_by_one = [
                (kind.n, self.operation(kind))
                for kind in kinds_of_operations(self.config.model, self.config.lora, layers)
                if kind.op.kind == "product" and kind.op.reads[0].axes[0] == "time"
            ]
            sums = (sum(n * each[i] for n, each in one_by_one) for i in range(3))
            self._reading[layers] = PassSeconds(*sums)
        return self._reading[layers]

    def computes_again(self, op: Operation) -> bool:
        """Whether activation checkpointing computes an operation of a block twice."""
        if self.checkpoint is None:
            return False
        return self.recomputes_products or not self.bytes.saves_selectively(op)

    def operation(self, kind: Kind) -> PassSeconds:
        """The passes of one operation; those of equal shapes are computed once."""
        if kind.key not in self._known:
            times, fresh = self._times(kind.op), self._fresh(kind.op)
            pairs = zip(times, fresh, strict=True)
            both = PassSeconds(*(sum(pair) / self.shares.step_share for pair in pairs))
            if not kind.op.gives_gradient:
                both = both._replace(backward_input=0.0)
            self._known[kind.key] = both
        return self._known[kind.key]

    def _fresh(self, op: Operation) -> PassSeconds:
        """What it takes to get the memory of results and gradients, where freed memory goes back to
        the system: on a CPU under ZeRO, whose gathered weights would leave holes in a heap."""
        rate = self.cluster.device.calibration.fresh_bytes_per_second
        if rate is None or not self.layout.zero:
            return PassSeconds(0.0, 0.0, 0.0)
        n = sum(math.prod(self.layout.parameter_shape(s.shape, s.axes)) for s in op.parameters)
        made = (self._bytes([op.result]), self._bytes(op.reads), self.sizes.element_bytes * n)
        return PassSeconds(*(each * self.cluster.sharing / rate for each in made))

    def _times(self, op: Operation) -> PassSeconds:
        by_kind: dict[str, Callable[[Operation], PassSeconds]] = {
            "product": self._product,
            "head": self._head,
            "attention": self._attention,
            "look_up": self._look_up,
            "norm": self._norm,
            "activation": self._activation,
            "rotation": self._rotation,
            "dropout": self._dropout,
        }
        return by_kind.get(op.kind, self._element_wise)(op)

    def _product(self, op: Operation) -> PassSeconds:
        """A product; its two gradients are products of the same three sides."""
        n_tokens, n_out = self.layout.local_shape(op.result.shape, op.result.axes)
        (x,) = op.reads
        _, n_in = self.layout.local_shape(x.shape, ("context", x.axes[1]))
        m = self.sizes.micro_batch_size * n_tokens
        # A grid multiplies block after block, or rows gathered from others.
        n_blocks = 1 if self.layout.tensor_mode == "1d" else self.layout.sizes["tensor"]
        p = self.sizes.product_bytes
        forward, to_input, to_weight = (
            n_blocks * product_seconds(self.cluster, self.shares, self.peak, *sides, p)
            for sides in ((m, n_out, n_in), (m, n_in, n_out), (n_out, n_in, m))
        )
        rounding, adding = self._weight_bytes(op.parameters)
        if not self.joins and self.bytes.rounds_weights:  # inputs and gradients, each by itself
            both = 1 + self.sizes.element_bytes / self.sizes.product_bytes
            if x.dtype == "weights":
                one = both * self.bytes.of([replace(x, dtype="products")])
                forward += self._moving(one)
                to_input += self._moving(one)
            if op.result.axes[1] == "embed":  # what is added to the stream
                to_input += self._moving(both * self.bytes.of([op.result]))
        return PassSeconds(
            forward + self._moving(rounding),
            to_input,
            to_weight + self._moving(adding) if op.is_trained else 0.0,
        )

    def _weight_bytes(self, parameters: Sequence[ParameterSpec]) -> tuple[int, int]:
        """Bytes moved to round weights for products, and to widen their gradients and add them up.
        Where weights come rounded, gradients are added to whole ones in one operation."""
        e, p = self.sizes.element_bytes, self.sizes.product_bytes
        n = sum(
            math.prod(self.layout.parameter_shape(spec.shape, spec.axes)) for spec in parameters
        )
        if not self.bytes.rounds_weights:
            return 0, 3 * e * n if self.adds_whole else 0
        if self.weights_come_rounded:
            return 0, (2 * e + p if self.adds_whole else e + p) * n
        return (e + p) * n, (e + p + (3 * e if self.adds_whole else 0)) * n

    def _head(self, op: Operation) -> PassSeconds:
        """The last product with the loss: logits are read and written as float32 in each pass, and
        where operations are not joined rounded, and zeros written for the gradient, too."""
        product = self._product(op)
        p, width = self.sizes.product_bytes, max(4, self.sizes.element_bytes)
        n = self.bytes.of([op.result]) // self.sizes.bytes_of(op.result)
        forward = backward = 2 * width * n
        if not self.joins:
            forward, backward = forward + (p + width) * n, backward + (p + 3 * width) * n
        return product._replace(
            forward=product.forward + self._exponentials(forward, n),
            backward_input=product.backward_input + self._exponentials(backward, n),
        )

    def _attention(self, op: Operation) -> PassSeconds:
        """Attention in blocks that skips what is masked; with dropout of its weights in kernels,
        or two products of everything and the weights written out."""
        whole = math.prod(op.result.shape)
        local = math.prod(self.layout.local_shape(op.result.shape, op.result.axes))
        n_tokens = self.sizes.micro_batch_size * op.result.shape[0]
        flops = 2 * op.token_products * n_tokens * local / whole
        n_context, n_channels = op.result.shape
        n_attended = op.token_products / (2 * n_channels)
        channels = n_channels / self.config.model.n_heads
        shares, peak = self.shares, self.peak
        moved = self.bytes.of((*op.reads, op.result))
        drops, fused = op.result not in op.saves, self.bytes.sizes.fused_dropout
        if drops and not fused and not self.joins_activations:
            return self._written_attention(op, flops / (peak * shares.product_share), moved)
        share = shares.attention_share * channels / (channels + SOFTMAX_CHANNELS)
        share *= n_attended / (n_attended + ATTENTION_FILL)
        if self.cluster.device.units == 1:
            share = shares.attention_share
        is_seen = 1 - n_attended / (2 * n_context)  # half of it, without a window
        forward = flops * is_seen / (peak * share)
        backward = shares.attention_backward * forward
        if drops and fused:
            n_seen = flops * is_seen / (4 * channels)  # weights: two products of a head's channels
            mask = n_seen * HASH_OPERATIONS / (self.cluster.peak_flops("fp32") * WORDS_PER_FLOP)
            forward, backward = forward + mask, DROPPING_BACKWARD * backward + 2 * mask
        return PassSeconds(forward + self._moving(moved), backward + self._moving(2 * moved), 0.0)

    def _written_attention(self, op: Operation, products: float, moved: int) -> PassSeconds:
        """Attention whose weights are written out to be dropped: two products of all of them, and
        twice as many backward."""
        written = self.bytes.of(op.saves)
        mask = 0.0
        if not self.joins:
            mask = sum(self._mask(saved) for saved in op.saves if saved.dtype == "bool")
        return PassSeconds(
            2 * products + mask + self._moving(moved + 2 * written, 4),
            4 * products + self._moving(2 * moved + 2 * written, 6),
            0.0,
        )

    def _look_up(self, op: Operation) -> PassSeconds:
        """Rows read and written; backward a gradient of the whole table is zeroed and added to."""
        moved = self.bytes.of([op.result])
        (table,) = (spec for spec in op.parameters if len(spec.shape) == 2)
        n_table = math.prod(self.layout.parameter_shape(table.shape, table.axes))
        return PassSeconds(
            self._moving(2 * moved),
            0.0,
            self._moving(3 * moved + self.sizes.element_bytes * n_table) if op.is_trained else 0.0,
        )

    def _norm(self, op: Operation) -> PassSeconds:
        """A norm together with the addition to the stream before it, which is in no list."""
        stream = self._bytes(op.reads)
        rounded = self._bytes([replace(op.result, dtype="products")])  # as products read and write
        if self.joins:
            moved = 2 * (stream + rounded)
            return PassSeconds(self._moving(moved, 2), self._moving(moved, 2), 0.0)
        forward, backward = NORM_PASSES[self._by_steps(op)]
        return PassSeconds(
            self._moving((2 + forward) * stream + rounded, 2),
            self._moving((3 + backward) * stream, 2),
            0.0,
        )

    def _by_steps(self, op: Operation) -> bool:
        """Whether PyTorch computes a norm in several operations: an RMS norm on a CPU."""
        return self.config.model.norm == "rmsnorm" and self.cluster.device.units == 1

    def _activation(self, op: Operation) -> PassSeconds:
        """An activation function, and its slope."""
        if self.joins_activations:
            return PassSeconds(0.0, 0.0, 0.0)
        moving, n = self._element_wise(op), self.bytes.of([op.result])
        least = n // self.sizes.bytes_of(op.result) * self._per_exponential
        return PassSeconds(max(moving.forward, least), max(moving.backward_input, 2 * least), 0.0)

    @property
    def _per_exponential(self) -> float:
        """Seconds of an exponential in a process."""
        return self.cluster.device.calibration.exponential_seconds * self.cluster.sharing

    def _exponentials(self, n_bytes: int, n: int) -> float:
        """Time of moving bytes, and of as many exponentials beside it."""
        return max(self._moving(n_bytes), n * self._per_exponential)

    def _rotation(self, op: Operation) -> PassSeconds:
        """Queries or keys turned in float32."""
        if self.joins:
            return self._element_wise(op)
        precise = self._bytes([replace(op.result, dtype="float32")])
        forward, backward = (self._moving(n * precise) for n in ROTATION_PASSES)
        return PassSeconds(forward, backward, 0.0)

    def _dropout(self, op: Operation) -> PassSeconds:
        """Dropout, with a mask that is computed. That of what is added to the stream is joined to
        the norm that follows."""
        once = self._element_wise(op)
        if self.joins:
            return once if op.layer is None else PassSeconds(0.0, 0.0, 0.0)
        return once._replace(forward=once.forward + self._mask(op.result))

    def _mask(self, tensor: ActivationTensor) -> float:
        """Time of the keyed mask of a tensor, where each operation on its words is one of its own:
        a word is read and written."""
        words = self._bytes([replace(tensor, dtype="float32")])
        return HASH_OPERATIONS * self._moving(2 * words)

    def _element_wise(self, op: Operation) -> PassSeconds:
        """Numbers read and written; backward a gradient and what was read give those of that. The
        product of a gate is one more operation."""
        read, written = self._bytes(op.reads), self._bytes([op.result])
        forward, backward = read + written, 2 * read + written
        if not self.joins and len(op.reads) > 1:
            forward, backward = forward + read, backward + 2 * read
        return PassSeconds(self._moving(forward), self._moving(backward), 0.0)

    def _bytes(self, tensors: Iterable[ActivationTensor]) -> int:
        return sum(self.bytes.of([tensor]) for tensor in tensors)

    def _moving(self, n_bytes: float, n_kernels: int = 1) -> float:
        if not n_bytes:
            return 0.0
        return n_bytes / self.cluster.memory_bandwidth + n_kernels * self.shares.kernel_seconds
