"""The seconds that a model's operations take on a device: a roofline model for each.

A matmul is split into tiles that the device's processors compute in waves; it takes as long as its
arithmetic or its memory traffic, whichever is longer. Attention is two matmuls, and causal
attention computes half. Everything else is bound by memory bandwidth. The cluster's `Calibration`
holds the fractions of the published figures that are reached; no other constant is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from pentameter.config.choices import look_up
from pentameter.config.schema import LoraConfig, ModelConfig
from pentameter.estimating.bytes.costs import (
    RECOMPUTES_PRODUCTS,
    ActivationBytes,
    PassSeconds,
    Step,
)
from pentameter.estimating.bytes.operation_communication import recomputed_results
from pentameter.estimating.seconds.cluster import Cluster, Device, ProductShares, trained_precision
from pentameter.planning.adapters import run_operations
from pentameter.planning.architecture import ActivationTensor, Operation, ParameterSpec
from pentameter.planning.fused_step import dropout_kernel_obstacle, fused_obstacle
from pentameter.planning.layouts.layout import Layout
from pentameter.planning.layouts.layout_checks import may_compile

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.6))
"""Rows and columns of a matmul tile, and its speed relative to the largest tile, which reads least
for its arithmetic (CUTLASS's usual tiles; the best one for a shape is used)."""
TILE_FILL = 128
"""Depth added to each matmul's inner dimension, for the time to fill a tile's pipeline and write
its result."""
SOFTMAX_CHANNELS = 16
"""Channels added to each head's size, for the time that the softmax takes between attention's
matmuls."""
ATTENTION_FILL = 256
"""Context length at which fused attention spends half its time on partly filled blocks."""


HASH_OPERATIONS = 14
"""Operations on 32-bit words that compute one element's random bits for a dropout mask
(`keyed.bits`)."""
DROPPING_BACKWARD = 7 / 5
"""Backward matmuls in kernels with attention dropout ÷ those in a fused kernel without: two of the
kernels each compute scores and their gradients (`model/attention/dropout_kernels.py`)."""
WORDS_PER_FLOP = 1 / 4
"""A GPU's operations on 32-bit words ÷ its fp32 FLOPs outside matrix units: it has half as many
units for the former, and the latter count multiplication and addition."""
ROTATION_PASSES = (12, 16)
"""Number of times that a rotary embedding without fusion reads or writes each number as float32,
(forward, backward)."""

NORM_PASSES = {False: (2, 3), True: (7, 12)}
"""Number of times that a norm reads or writes the residual stream, (forward, backward). The key
says whether PyTorch computes the norm in several operations."""


class Kind(NamedTuple):
    """A group of the model's operations that take equal time: `op` is one of them, `n` their
    number. A named tuple."""

    op: Operation
    key: str
    """Identifies the shapes and costs. Operations with equal keys take equal time, in any stage."""
    runs_again: bool
    """Whether full activation checkpointing recomputes these operations: within a block, all before
    the last one that saves a tensor, since no backward pass reads the later results."""
    n: int


@lru_cache(maxsize=4096)
def kinds_of_operations(model: ModelConfig, lora: LoraConfig, layers: range) -> tuple[Kind, ...]:
    """Return the operations in a range of layers, grouped by equal shapes and costs. The embedding
    is included with layer 0, the final norm and the head with the last layer."""
    found: dict[str, Kind] = {}
    run = run_operations(model, lora, layers)
    repeated = recomputed_results(run)
    for op in run:
        shapes = tuple((each.shape, each.axes, each.dtype) for each in (*op.reads, op.result))
        again = op.name in repeated
        costs = (op.token_products, op.contracts, len(op.saves), op.is_trained, op.gives_gradient)
        exchanged = tuple(each.kind for each in op.collectives)
        key = repr((op.kind, shapes, *costs, exchanged, again))
        n = found[key].n + 1 if key in found else 1
        found[key] = Kind(op, key, again, n)
    return tuple(found.values())


def product_seconds(
    cluster: Cluster, shares: ProductShares, peak: float, m: int, n: int, k: int, width: int
) -> float:
    """Return the seconds for one matmul (m, k) × (k, n) with `width` bytes per number, on a rank
    whose peak is `peak` FLOP/s, of which it reaches the fractions in `shares`."""
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
    """Return the number of waves in which `units` processors compute all tiles of an (m, n) result,
    with `rows` × `columns` per tile. It is fractional beyond the first wave, because libraries
    split the last tiles along their depth."""
    turns = -(-m // rows) * -(-n // columns) / units
    whole = math.ceil(turns)
    return whole if whole == 1 else (turns + whole) / 2


class _ElementwiseTime:
    """Estimates the seconds of operations that are limited by memory bandwidth: all but matmuls and
    attention."""

    def __init__(self, step: Step, cluster: Cluster) -> None:
        self.step = step
        config, layout, rules = step.config, step.layout, step.rules
        self.cluster = cluster
        others = trained_precision(step.precision)
        fused = fuses_dropout(config.model, layout, others, cluster.device)
        self.bytes = ActivationBytes(replace(step, drops_by_blocks=fused))
        self.adds_whole = step.n_micro_batches > 1 and not rules.reduces_each_micro_batch
        self.weights_come_rounded = rules.weights_come_rounded(step.n_micro_batches)
        self.joins = may_compile(layout, config.train)
        """Whether consecutive element-wise operations are fused into one, as compilation does;
        otherwise each reads the previous one's output."""
        calibration = cluster.device.calibration
        is_fused = self.joins and fused_obstacle(config, layout) is None
        self.joins_activations = is_fused and step.precision in calibration.fused
        """Whether activation functions run within the adjacent matmuls, and attention dropout
        within attention, as in the fused CPU step."""
        self.shares = calibration.products(step.precision, fused=is_fused)
        self.peak = cluster.peak_flops(others, config.train.matmul_precision)
        self.linear_peak, self.rounds_to_8_bits = self.peak, others != step.precision
        if self.rounds_to_8_bits:
            self.linear_peak = cluster.peak_flops(step.precision)
        # Else, by `plan --matmuls`, all linear layers and gradients are narrow.
        self.own_matmuls = config.train.matmuls is not None
        precise = cluster.device.peak_flops("fp32", config.train.matmul_precision)
        self.precise_peak = self.peak if precise is None else precise / cluster.sharing

    def _look_up(self, op: Operation) -> PassSeconds:
        """Return the seconds for an embedding lookup, which reads and writes one row per token. The
        backward pass zeroes a gradient for the whole table and adds to it."""
        moved = self.bytes.of([op.result])
        (table,) = (spec for spec in op.parameters if len(spec.shape) == 2)
        n_table = math.prod(self.step.sharding.parameter_shape(table))
        adding = self._moving(3 * moved + self.step.element_bytes * n_table)
        return PassSeconds(self._moving(2 * moved), 0.0, adding if op.is_trained else 0.0)

    def _norm(self, op: Operation) -> PassSeconds:
        """Return the seconds for a norm and for the residual addition before it, which is not
        listed as an operation."""
        stream = self._bytes(op.reads)
        rounded = self._bytes([replace(op.result, dtype="products")])  # as matmuls read it
        if self.joins:
            moved = 2 * (stream + rounded)
            return PassSeconds(self._moving(moved, 2), self._moving(moved, 2), 0.0)
        # An RMS norm on a CPU.
        by_steps = self.step.config.model.norm == "rmsnorm" and self.cluster.device.units == 1
        n_forward, n_backward = NORM_PASSES[by_steps]
        forward = self._moving((2 + n_forward) * stream + rounded, 2)
        return PassSeconds(forward, self._moving((3 + n_backward) * stream, 2), 0.0)

    def _activation(self, op: Operation) -> PassSeconds:
        """Return the seconds for an activation function and its derivative, bound by memory or by
        exponentials; 0 if computed within a matmul."""
        if self.joins_activations:
            return PassSeconds(0.0, 0.0, 0.0)
        moving, n = self._element_wise(op), self.bytes.of([op.result])
        least = n // self.step.bytes_of(op.result) * self._per_exponential
        return PassSeconds(max(moving.forward, least), max(moving.backward_input, 2 * least), 0.0)

    @property
    def _per_exponential(self) -> float:
        """Seconds per exponential on one rank."""
        return self.cluster.device.calibration.exponential_seconds * self.cluster.sharing

    def _exponentials(self, n_bytes: int, n: int) -> float:
        """Return the seconds for moving `n_bytes` or for computing `n` exponentials meanwhile,
        whichever is longer."""
        return max(self._moving(n_bytes), n * self._per_exponential)

    def _rotation(self, op: Operation) -> PassSeconds:
        """Return the seconds for a rotary embedding on queries or keys, in float32."""
        if self.joins:
            return self._element_wise(op)
        precise = self._bytes([replace(op.result, dtype="float32")])
        forward, backward = (self._moving(n * precise) for n in ROTATION_PASSES)
        return PassSeconds(forward, backward, 0.0)

    def _dropout(self, op: Operation) -> PassSeconds:
        """Return the seconds for dropout, including its random mask. With compilation, dropout
        before a residual addition costs nothing, because it is fused with the following norm; only
        the embedding's dropout then counts."""
        once = self._element_wise(op)
        if self.joins:
            return once if op.layer is None else PassSeconds(0.0, 0.0, 0.0)
        return once._replace(forward=once.forward + self._mask(op.result))

    def _mask(self, tensor: ActivationTensor) -> float:
        """Return the seconds for computing a tensor's dropout mask from its key with one kernel per
        word operation, each of which reads and writes 32 bits per element."""
        words = self._bytes([replace(tensor, dtype="float32")])
        return HASH_OPERATIONS * self._moving(2 * words)

    def _element_wise(self, op: Operation) -> PassSeconds:
        """Return the seconds for an element-wise operation. The forward pass reads the inputs and
        writes the result; the backward pass reads the gradient and the inputs, and writes the
        inputs' gradients. Without fusion, a gate's multiplication (a second input) is one more
        operation."""
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


class _OperationTime(_ElementwiseTime):
    """Estimates the seconds that any operation of the model takes in each pass, for one
    micro-batch."""

    def of(self, op: Operation) -> PassSeconds:
        """Return the forward, backward-input and backward-weight seconds for one operation;
        backward-input is 0 if nothing needs its input's gradient."""
        pairs = zip(self._times(op), self._fresh(op), strict=True)
        both = PassSeconds(*(sum(pair) / self.shares.step_share for pair in pairs))
        return both if op.gives_gradient else both._replace(backward_input=0.0)

    def _fresh(self, op: Operation) -> PassSeconds:
        """Return the seconds per pass in which the system allocates memory for results and
        gradients. They count where freed memory goes back to the system, on a CPU with ZeRO, whose
        gathered weights would leave holes in a heap; 0 elsewhere."""
        rate = self.cluster.device.calibration.fresh_bytes_per_second
        if rate is None or not self.step.layout.zero:
            return PassSeconds(0.0, 0.0, 0.0)
        trained = (spec for spec in op.parameters if spec.is_trained)
        n = sum(math.prod(self.step.sharding.parameter_shape(spec)) for spec in trained)
        made = (self._bytes([op.result]), self._bytes(op.reads), self.step.element_bytes * n)
        return PassSeconds(*(each * self.cluster.sharing / rate for each in made))

    def _times(self, op: Operation) -> PassSeconds:
        by_kind: dict[str, Callable[[Operation], PassSeconds]] = {
            "product": self._matmul,
            "head": self._head,
            "attention": self._attention,
            "look_up": self._look_up,
            "norm": self._norm,
            "activation": self._activation,
            "rotation": self._rotation,
            "dropout": self._dropout,
        }
        return by_kind.get(op.kind, self._element_wise)(op)

    def _matmul(self, op: Operation) -> PassSeconds:
        """Return the seconds for a weight's matmul, (m, k) × (k, n), and for both its gradients,
        including rounding and accumulation. The gradients are matmuls with the same three sizes.
        For experts, count the matrices of all experts on the rank, and moving the rows to and from
        them."""
        n_tokens, n_out = self.step.local_shape(op.result)
        (x,) = op.reads
        _, n_in = self.step.sharding.local_shape(x.shape, ("context", x.axes[1]))
        m = self.step.micro_batch_size * n_tokens
        # A grid multiplies block by block, or with rows gathered from other ranks.
        n_products = self.step.layout.sizes["tensor"] if self.step.layout.is_grid else 1
        if (k := op.parameters[0].n_chosen) is not None:  # k rows a token, of a k-th of the numbers
            n_products, *_ = self.step.sharding.parameter_shape(op.parameters[0])
            m, n_out, n_in = math.ceil(m * k / n_products), n_out // k, n_in // k
        p, is_expert = self.step.product_bytes, op.parameters[0].n_chosen is not None
        is_narrow = op.kind == "product" and not (self.own_matmuls and is_expert)
        peak = self.linear_peak if is_narrow else self.peak
        if op.result.dtype == "softmax":  # a router's logits, in float32 whatever the precision
            p, peak = self.step.summed_bytes, self.precise_peak
        forward, to_input, to_weight = (
            n_products * product_seconds(self.cluster, self.shares, at, *sides, p)
            for at, sides in (
                (peak, (m, n_out, n_in)),
                (peak, (m, n_in, n_out)),
                (self.peak if self.own_matmuls and is_narrow else peak, (n_out, n_in, m)),
            )
        )
        sorting = self._sorting(op)
        forward, to_input = forward + sorting.forward, to_input + sorting.backward_input
        if self.rounds_to_8_bits and peak is self.linear_peak:
            # Read in 16 bits, written in 8, by rows and by columns: operands lie along the sum.
            forward += self._moving(2 * self.bytes.of([replace(x, dtype="products")]))
            to_input += self._moving(2 * self.bytes.of([replace(op.result, dtype="products")]))
        rounding, adding = self._weight_bytes(op.parameters)
        if not self.joins and self.step.rounds_weights:  # inputs and gradients, each separately
            both = 1 + self.step.element_bytes / self.step.product_bytes
            if self.step.bytes_of(x) > self.step.product_bytes:
                one = both * self.bytes.of([replace(x, dtype="products")])
                forward += self._moving(one)
                to_input += self._moving(one)
            is_added = op.result.axes[1] == "embed"  # to the stream
            if is_added and self.step.stream_bytes > self.step.product_bytes:
                to_input += self._moving(both * self.bytes.of([op.result]))
        to_weight = to_weight + self._moving(adding) if op.is_trained else 0.0
        return PassSeconds(forward + self._moving(rounding), to_input, to_weight)

    def _sorting(self, op: Operation) -> PassSeconds:
        """Return the seconds for sorting rows by expert, in memory, before the experts' first
        matmul, or for restoring their order after the last; 0 for other matmuls. Rows from other
        ranks are sorted once more."""
        forward = backward = 0.0
        for each in op.collectives:
            if each.kind not in ("dispatch", "combine"):
                continue
            rows = self.bytes.of([each.tensor])
            forward += self._moving(2 * rows)  # read in one order, written in another
            # A token's gradient is the sum over its rows, which are read once more for it.
            backward += self._moving((3 if each.kind == "dispatch" else 2) * rows, 2)
            if self.step.layout.shards_experts:
                received = op.reads[0] if each.kind == "dispatch" else op.result
                again = self._moving(2 * self.bytes.of([received]))
                forward, backward = forward + again, backward + again
        return PassSeconds(forward, backward, 0.0)

    def _weight_bytes(self, parameters: Sequence[ParameterSpec]) -> tuple[int, int]:
        """Return two numbers of bytes moved in a micro-batch: to round these weights for matmuls,
        and to add their gradients. The first is 0 if weights come in the matmul dtype already. The
        second counts widening gradients from a narrower dtype, and accumulating them if
        micro-batches add unsharded gradients."""
        e, p = self.step.element_bytes, self.step.product_bytes
        n = sum(math.prod(self.step.sharding.parameter_shape(spec)) for spec in parameters)
        if not self.step.rounds_weights:
            return 0, 3 * e * n if self.adds_whole else 0
        if self.weights_come_rounded:
            return 0, (2 * e + p if self.adds_whole else e + p) * n
        return (e + p) * n, (e + p + (3 * e if self.adds_whole else 0)) * n

    def _head(self, op: Operation) -> PassSeconds:
        """Return the seconds for the head's matmul and the loss. Logits are read and written as
        float32 in each pass; without fusion they are also rounded, and zeros are written for the
        gradient."""
        matmul = self._matmul(op)
        p, width = self.step.product_bytes, self.step.summed_bytes
        n = self.bytes.of([op.result]) // self.step.bytes_of(op.result)
        forward = backward = 2 * width * n
        if not self.joins:
            forward, backward = forward + (p + width) * n, backward + (p + 3 * width) * n
        return matmul._replace(
            forward=matmul.forward + self._exponentials(forward, n),
            backward_input=matmul.backward_input + self._exponentials(backward, n),
        )

    def _attention(self, op: Operation) -> PassSeconds:
        """Return the seconds for attention between the projections. Fused attention skips masked
        blocks. If attention dropout is on and neither GPU kernels nor the fused CPU step apply it,
        attention is instead two full matmuls that write out the attention weights."""
        whole = math.prod(op.result.shape)
        local = math.prod(self.step.sharding.local_shape(op.result.shape, op.result.axes))
        n_tokens = self.step.micro_batch_size * op.result.shape[0]
        flops = 2 * op.token_products * n_tokens * local / whole
        n_context, n_channels = op.result.shape
        n_attended = self.step.config.model.window(op.layer or 0) or n_context
        channels = n_channels / self.step.config.model.attention.n_heads
        shares, peak = self.shares, self.peak
        moved = self.bytes.of((*op.reads, op.result))
        drops, fused = op.result not in op.saves, self.bytes.step.drops_by_blocks
        if drops and not fused and not self.joins_activations:
            return self._written_attention(op, flops / (peak * shares.product_share), moved)
        fraction = shares.attention_share * channels / (channels + SOFTMAX_CHANNELS)
        fraction *= n_attended / (n_attended + ATTENTION_FILL)
        if self.cluster.device.units == 1:
            fraction = shares.attention_share
        is_seen = 1 - n_attended / (2 * n_context)  # half without a window
        forward = flops * is_seen / (peak * fraction)
        backward = shares.attention_backward * forward
        if drops and fused:
            n_seen = flops * is_seen / (4 * channels)  # weights: two matmuls over a head's channels
            mask = n_seen * HASH_OPERATIONS / (self.cluster.peak_flops("fp32") * WORDS_PER_FLOP)
            forward, backward = forward + mask, DROPPING_BACKWARD * backward + 2 * mask
        return PassSeconds(forward + self._moving(moved), backward + self._moving(2 * moved), 0.0)

    def _written_attention(self, op: Operation, matmul: float, moved: int) -> PassSeconds:
        """Return the seconds for attention that stores its weights, for dropout: two full matmuls
        of `matmul` seconds each forward, and four backward. `moved` is the bytes of its inputs and
        result."""
        written = self.bytes.of(op.saves)
        mask = 0.0
        if not self.joins:
            mask = sum(self._mask(saved) for saved in op.saves if saved.dtype == "bool")
        forward = 2 * matmul + mask + self._moving(moved + 2 * written, 4)
        backward = 4 * matmul + self._moving(2 * moved + 2 * written, 6)
        return PassSeconds(forward, backward, 0.0)


class ComputeTime:
    """Estimated pass times in seconds for one micro-batch, by stage or by operation, on one rank;
    results are cached."""

    def __init__(self, step: Step, cluster: Cluster) -> None:
        self.step = step
        self._operations = _OperationTime(step, cluster)
        how = step.config.train.activation_checkpoint
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
        """A hashable key by which results are shared between layouts: equal where equal layers take
        equal time (same model, cluster and precision)."""
        layout, train, each = self.step.layout, self.step.config.train, self._operations
        return (
            layout.tensor, layout.sequence, layout.context, layout.zero > 0, each.joins,
            layout.expert, layout.expert_tensor, self.step.imbalance,
            train.micro_batch_size, train.activation_checkpoint, each.adds_whole,
            each.weights_come_rounded, each.joins_activations, each.bytes.step.drops_by_blocks,
        )  # fmt: skip

    def stage(self, layers: range) -> PassSeconds:
        """Return the pass times for one micro-batch in a stage with these layers, including
        recomputation in the backward pass."""
        if layers not in self._slices:
            self._slices[layers] = self._slice(layers)
        return self._slices[layers]

    def _slice(self, layers: range) -> PassSeconds:
        kinds = kinds_of_operations(self.step.config.model, self.step.config.lora, layers)
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
        """Return the seconds for attention in a stage with these layers, forward and backward
        together, for one micro-batch. Ring attention overlaps its messages with them."""
        return sum(
            kind.n * sum(self.operation(kind))
            for kind in kinds_of_operations(self.step.config.model, self.step.config.lora, layers)
            if kind.op.kind == "attention"
        )

    def reading(self, layers: range) -> PassSeconds:
        """Return the pass times for one micro-batch in a stage's column-parallel matmuls alone
        (those that read the residual stream); their gradients may overlap with communication."""
        if layers not in self._reading:
            self._reading[layers] = self._matmuls(layers, lambda op: op.reads[0].axes[0] == "time")
        return self._reading[layers]

    def shared_experts(self, layers: range) -> PassSeconds:
        """Return the pass times for one micro-batch in the matmuls of a stage's shared experts,
        with which the exchange of other experts' rows overlaps."""
        return self._matmuls(layers, lambda op: op.name.rpartition(".")[0].endswith(".shared"))

    def _matmuls(self, layers: range, counts: Callable[[Operation], bool]) -> PassSeconds:
        """Return the pass times for one micro-batch in those matmuls of a stage with these layers
        for which `counts` returns True."""
        one_by_one = [
            (kind.n, self.operation(kind))
            for kind in kinds_of_operations(self.step.config.model, self.step.config.lora, layers)
            if kind.op.kind == "product" and counts(kind.op)
        ]
        sums = (sum(n * each[i] for n, each in one_by_one) for i in range(3))
        return PassSeconds(*sums)

    def computes_again(self, op: Operation) -> bool:
        """Whether the configured activation checkpointing recomputes an operation within a
        block."""
        if self.checkpoint is None:
            return False
        return self.recomputes_products or not self._operations.bytes.saves_selectively(op)

    def operation(self, kind: Kind) -> PassSeconds:
        """Return the pass times for one micro-batch in one of the equal operations that `kind`
        groups, without recomputation."""
        if kind.key not in self._known:
            self._known[kind.key] = self._operations.of(kind.op)
        return self._known[kind.key]


def fuses_dropout(model: ModelConfig, layout: Layout, precision: str, device: Device) -> bool:
    """Return whether GPU kernels are planned to apply attention dropout without writing out the
    weights: on a GPU whose matrix units support bf16, as all GPUs with these kernels do, and whose
    fp32 peak is known. A run checks the kernels before its first step; if they fail, it writes the
    weights out and warns."""
    is_served = device.units > 1 and {"bf16", "fp32"} <= device.tflops.keys()
    drops = model.attention.dropout > 0
    return drops and is_served and dropout_kernel_obstacle(model, layout, precision) is None
