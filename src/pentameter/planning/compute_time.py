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
from pentameter.config.schema import Config, ModelConfig
from pentameter.planning.architecture import ActivationTensor, Operation, ParameterSpec, operations
from pentameter.planning.cluster import Cluster
from pentameter.planning.costs import (
    RECOMPUTES_PRODUCTS,
    ActivationBytes,
    PassSeconds,
    StepSizes,
)
from pentameter.planning.layout import Layout

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.6))
"""Rows and columns of a product's tiles, and the speed of each size relative to the largest, which
reads least for what it computes (CUTLASS's usual tiles; the best of a shape is taken)."""
TILE_FILL = 128
"""Depth of a product that takes as long as filling a tile's pipeline and writing its result."""
SOFTMAX_CHANNELS = 16
"""Channels of a head whose products take as long as the softmax between them."""
ATTENTION_FILL = 256
"""Context length at which half of fused attention is spent on blocks that are filled in part."""
ATTENTION_BACKWARD = 2.5
"""Products of fused attention's backward pass ÷ those of its forward pass: five against two (Dao
et al. 2022, "FlashAttention", algorithm 4)."""


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
def kinds_of_operations(model: ModelConfig, layers: range) -> tuple[Kind, ...]:
    """The operations of a slice of the model, those of equal shapes together."""
    found: dict[str, Kind] = {}
    run = operations(model, layers)
    last_saving = {op.layer: index for index, op in enumerate(run) if op.saves}
    for index, op in enumerate(run):
        shapes = tuple((each.shape, each.axes, each.dtype) for each in (*op.reads, op.result))
        again = op.layer is not None and index < last_saving[op.layer]
        key = repr((op.kind, shapes, op.token_products, op.contracts, len(op.saves), again))
        n = found[key].n + 1 if key in found else 1
        found[key] = Kind(op, key, again, n)
    return tuple(found.values())


def product_seconds(cluster: Cluster, precision: str, m: int, n: int, k: int, width: int) -> float:
    """Time of a product (m, k) × (k, n) of numbers of `width` bytes."""
    device = cluster.device
    peak = cluster.peak_flops(precision) * device.calibration.product_share
    if device.units == 1:
        arithmetic = 2 * m * n * k / peak
    else:
        arithmetic = min(
            _waves(m, n, rows, columns, device.units)
            * (2 * rows * columns * (k + TILE_FILL) * device.units / (peak * speed))
            for rows, columns, speed in TILES
        )
    moved = width * (m * k + k * n + m * n) / cluster.memory_bandwidth
    return max(arithmetic, moved) + device.calibration.kernel_seconds


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
        self.bytes = ActivationBytes(config, layout, sizes)
        self.kernel_seconds = cluster.device.calibration.kernel_seconds
        self.accumulates = sizes.n_micro_batches > 1
        how = config.train.activation_checkpoint
        self.checkpoint = how
        self.recomputes_products = look_up(
            RECOMPUTES_PRODUCTS, how, "train.activation_checkpoint", "the planner's times"
        )
        self._known: dict[str, PassSeconds] = {}
        self._stages: dict[object, PassSeconds] = {}

    def stage(self, layers: range) -> PassSeconds:
        """The passes of a stage; stages of as many alike layers take the same time."""
        kinds = kinds_of_operations(self.config.model, layers)
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
            for kind in kinds_of_operations(self.config.model, layers)
            if kind.op.kind == "attention"
        )

    def computes_again(self, op: Operation) -> bool:
        """Whether activation checkpointing computes an operation of a block twice."""
        if self.checkpoint is None:
            return False
        return self.recomputes_products or not op.saved_selectively

    def operation(self, kind: Kind) -> PassSeconds:
        """The passes of one operation; those of equal shapes are computed once."""
        if kind.key not in self._known:
            self._known[kind.key] = self._times(kind.op)
        return self._known[kind.key]

    def _times(self, op: Operation) -> PassSeconds:
        by_kind: dict[str, Callable[[Operation], PassSeconds]] = {
            "product": self._product,
            "head": self._head,
            "attention": self._attention,
            "look_up": self._look_up,
            "norm": self._norm,
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
            n_blocks * product_seconds(self.cluster, self.precision, *sides, p)
            for sides in ((m, n_out, n_in), (m, n_in, n_out), (n_out, n_in, m))
        )
        rounding, adding = self._weight_bytes(op.parameters)
        return PassSeconds(
            forward + self._moving(rounding), to_input, to_weight + self._moving(adding)
        )

    def _weight_bytes(self, parameters: Sequence[ParameterSpec]) -> tuple[int, int]:
        """Bytes moved to round weights for products, and to add their gradients up."""
        e, p = self.sizes.element_bytes, self.sizes.product_bytes
        local = (
            math.prod(self.layout.parameter_shape(spec.shape, spec.axes)) for spec in parameters
        )
        n = sum(local)
        rounding = (e + p) * n if self.bytes.rounds_weights and not self.layout.zero else 0
        return rounding, (p + (2 * e if self.accumulates else e)) * n

    def _head(self, op: Operation) -> PassSeconds:
        """The last product with the loss: logits are read and written as float32 in each pass."""
        product = self._product(op)
        width = max(4, self.sizes.element_bytes)
        logits = self.bytes.of([op.result]) // self.sizes.bytes_of(op.result)
        return product._replace(
            forward=product.forward + self._moving(2 * width * logits),
            backward_input=product.backward_input + self._moving(2 * width * logits),
        )

    def _attention(self, op: Operation) -> PassSeconds:
        """Attention in blocks that skips what is masked, or, with dropout of its weights, two
        products of everything and the weights written out."""
        whole = math.prod(op.result.shape)
        local = math.prod(self.layout.local_shape(op.result.shape, op.result.axes))
        n_tokens = self.sizes.micro_batch_size * op.result.shape[0]
        flops = 2 * op.token_products * n_tokens * local / whole
        n_context, n_channels = op.result.shape
        n_attended = op.token_products / (2 * n_channels)
        channels = n_channels / self.config.model.n_heads
        calibration = self.cluster.device.calibration
        peak = self.cluster.peak_flops(self.precision)
        moved = self.bytes.of((*op.reads, op.result))
        if op.result not in op.saves:  # the weights are written out
            written = self.bytes.of(op.saves)
            forward = flops / (peak * calibration.product_share) * 2
            return PassSeconds(
                forward + self._moving(moved + 2 * written, 4),
                2 * forward + self._moving(2 * moved + 2 * written, 6),
                0.0,
            )
        share = calibration.attention_share * channels / (channels + SOFTMAX_CHANNELS)
        share *= n_attended / (n_attended + ATTENTION_FILL)
        if self.cluster.device.units == 1:
            share = calibration.attention_share
        is_seen = 1 - n_attended / (2 * n_context)  # half of it, without a window
        forward = flops * is_seen / (peak * share)
        return PassSeconds(
            forward + self._moving(moved), ATTENTION_BACKWARD * forward + self._moving(2 * moved), 0
        )

    def _look_up(self, op: Operation) -> PassSeconds:
        """Rows read and written; backward a gradient of the whole table is zeroed and added to."""
        moved = self.bytes.of([op.result])
        (table,) = (spec for spec in op.parameters if len(spec.shape) == 2)
        n_table = math.prod(self.layout.parameter_shape(table.shape, table.axes))
        return PassSeconds(
            self._moving(2 * moved),
            0.0,
            self._moving(3 * moved + self.sizes.element_bytes * n_table),
        )

    def _norm(self, op: Operation) -> PassSeconds:
        """A norm together with the addition to the stream before it, which is in no list."""
        products = replace(op.result, dtype="products")  # as the next product reads it
        moved = 2 * self._bytes((*op.reads, products))
        return PassSeconds(self._moving(moved, 2), self._moving(moved, 2), 0.0)

    def _element_wise(self, op: Operation) -> PassSeconds:
        read, written = self._bytes(op.reads), self._bytes([op.result])
        return PassSeconds(self._moving(read + written), self._moving(2 * read + written), 0.0)

    def _bytes(self, tensors: Iterable[ActivationTensor]) -> int:
        return sum(self.bytes.of([tensor]) for tensor in tensors)

    def _moving(self, n_bytes: float, n_kernels: int = 1) -> float:
        if not n_bytes:
            return 0.0
        return n_bytes / self.cluster.memory_bandwidth + n_kernels * self.kernel_seconds
