"""The architecture of a model, written down once: its parameters and its operations.

Everything here follows from the model's configuration alone. Divisions, initial values, weight
decay and checkpoints read the table of parameters; FLOPs, memory, traffic and the weights of
pipeline stages are folds over the list of operations (`planning/costs.py`, `planning/traffic.py`).
Tests hold the table equal to the built model's `state_dict()` and the operations equal to what the
model multiplies and saves, so a variant is added here and in `pentameter.model`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from pentameter.config.choices import look_up, refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.errors import ConfigError

NORM_MAY_HAVE_BIAS = {"layernorm": True, "rmsnorm": False}
FINAL_NORM = {"pre": True, "post": False, "output": True}
POSITION_TABLE = {"learned": True, "sinusoidal": False, "rotary": False}

SAVES_INPUT = {"relu": False, "relu2": True, "gelu": True, "gelu_tanh": True}
"""`model.activation` → whether its slope is computed from its input, not from its result."""
GATES = {"swiglu": True, "geglu": True, **dict.fromkeys(SAVES_INPUT, False)}
"""`model.activation` → whether it is a gate's, whose matrix is one more."""

Axis = Literal[
    "vocab", "position", "embed", "heads", "kv_heads", "head", "mlp", "time", "context", "message",
    "rank",
]  # fmt: skip
"""What a dimension of a parameter or of an activation runs over.

`heads` is all heads' channels, head by head: H·K of the attention output, or (H, 3, K) flattened of
the fused query, key and value projection. `kv_heads` is the same of keys and values that several
queries share, (G, 2, K) flattened; `head` is the channels of one head. `time` is the tokens of the
residual stream, of which each may be computed alone; `context` is all tokens of a sequence, as the
matrix products around attention read them; `message` is the tokens of the stream as pipeline stages
send them. `rank` is between the two matrices of an adapter. Which mesh dimension divides an axis is
said in `planning/layout.py`.
"""

ActivationType = Literal["weights", "products", "softmax", "float32", "bool"]
"""The dtype of an activation: the weights' (also the residual stream's), the one that goes into
matrix products, the softmax's (the weights', float32 at least), or one that is always the same."""

OperationKind = Literal[
    "look_up", "norm", "product", "rotation", "attention", "activation", "dropout", "head"
]


@dataclass(frozen=True)
class Init:
    """How a parameter starts: `scale` is normal's deviation, or uniform's bound ±scale. `own` is
    what the module that has it starts with."""

    kind: Literal["normal", "uniform", "zeros", "ones", "own"]
    scale: float = 0.0


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: `axes` names each dimension of `shape`; `layer` is its block, if it has one.

    `decay` is true of matrices, which is what GPT-2's weight decay applies to.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    init: Init
    decay: bool
    layer: int | None = None
    is_trained: bool = True

    @property
    def n_elements(self) -> int:
        """Numbers in the parameter."""
        return math.prod(self.shape)

    @property
    def is_block_matrix(self) -> bool:
        """Whether it is a matrix between layers' activations, as Muon takes: in a block, 2-D."""
        return self.layer is not None and len(self.shape) == 2


@dataclass(frozen=True)
class ActivationTensor:
    """An activation of one sequence: (tokens, numbers of each), their axes, and its dtype."""

    name: str
    shape: tuple[int, int]
    axes: tuple[Axis, Axis]
    dtype: ActivationType


@dataclass(frozen=True)
class Operation:
    """One operation of the forward pass, with what is needed to count its cost.

    `head` is the last matrix product and the loss in one, because its logits may be computed in
    chunks. Additions and changes of shape cost next to nothing and are left out.
    """

    name: str
    kind: OperationKind
    layer: int | None
    """The block it belongs to, if it does."""
    reads: tuple[ActivationTensor, ...]
    result: ActivationTensor
    parameters: tuple[ParameterSpec, ...] = ()
    contracts: Axis | None = None
    """The axis that a matrix sums over; where it is divided, the result is a partial sum."""
    saves: tuple[ActivationTensor, ...] = ()
    """What the backward pass reads again, parameters not counted."""
    saves_by_blocks: tuple[ActivationTensor, ...] = ()
    """Of attention, what its backward pass reads where the weights are never written out whole."""
    token_products: int = 0
    """Multiplications of activations with activations, for each token of a full context."""
    reads_gradient: bool = True
    """Whether the backward pass computes the gradient of its result."""
    gives_gradient: bool = True
    """Whether it computes that of what it reads, too: not where nothing before it is trained."""

    @property
    def is_trained(self) -> bool:
        """Whether the backward pass computes gradients of its parameters."""
        return any(spec.is_trained for spec in self.parameters)

    @property
    def weight_products(self) -> int:
        """Multiplications with the numbers of its matrices, for each token."""
        if self.kind == "look_up":
            return 0
        return sum(spec.n_elements for spec in self.parameters if len(spec.shape) == 2)


def padded_vocab_size(model: ModelConfig) -> int:
    """Return the rows of embedding and head: `vocab_size`, up to the next `vocab_multiple`.

    Raises:
        ConfigError: `vocab_size` is not set.
    """
    if model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is not set; take it from the tokenizer, or set --model.vocab_size"
        )
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple


def feed_forward_width(model: ModelConfig) -> int:
    """Return the width of the feed-forward layer: `d_ff`, or 4 · d_model when it is not set."""
    return model.d_ff if model.d_ff is not None else 4 * model.d_model


def head_size(model: ModelConfig) -> int:
    """Return the channels of an attention head: `head_size`, or d_model / n_heads."""
    return model.head_size if model.head_size is not None else model.d_model // model.n_heads


def n_kv_heads(model: ModelConfig) -> int:
    """Return the heads of keys and values: `n_kv_heads`, or `n_heads` when it is not set."""
    return model.n_kv_heads if model.n_kv_heads is not None else model.n_heads


def resolved(model: ModelConfig) -> ModelConfig:
    """Return the same architecture with the sizes written out that follow from others where they
    are absent, so that two can be compared: `d_ff`, `head_size` and `n_kv_heads`."""
    sizes = {
        "d_ff": feed_forward_width(model),
        "head_size": head_size(model),
        "n_kv_heads": n_kv_heads(model),
    }
    return model.model_copy(update=sizes)


def shares_kv_heads(model: ModelConfig) -> bool:
    """Return whether several heads share keys and values. Their projection is then a matrix of its
    own; else one matrix makes queries, keys and values."""
    return n_kv_heads(model) != model.n_heads


def turning_channels(model: ModelConfig) -> int:
    """Return the channels of a head that rotary positions turn, an even number."""
    return round(head_size(model) * model.rotary_fraction)


def has_gate(model: ModelConfig) -> bool:
    """Return whether the feed-forward layer has a gate, a matrix as large as the one beside it."""
    return look_up(GATES, model.activation, "model.activation", "the parameter table")


def window(model: ModelConfig, layer: int) -> int | None:
    """Return how many tokens a query of a layer sees, itself included; None for all before it."""
    size, every = model.sliding_window, model.sliding_window_pattern
    if size is None or size >= model.context_length:
        return None
    return None if every is not None and (layer + 1) % every == 0 else size


def embedding_dropout(model: ModelConfig) -> float:
    """Return the dropout rate after the embedding: `dropout` when it has none of its own."""
    return model.dropout if model.embedding_dropout is None else model.embedding_dropout


def norm_has_bias(model: ModelConfig) -> bool:
    """Return whether norms have a bias; RMSNorm has none by definition."""
    possible = look_up(NORM_MAY_HAVE_BIAS, model.norm, "model.norm", "the parameter table")
    return model.bias and possible


def has_final_norm(model: ModelConfig) -> bool:
    """Return whether a norm stands between the last block and the head."""
    key = "model.norm_position"
    return look_up(FINAL_NORM, model.norm_position, key, "the parameter table")


def has_position_table(model: ModelConfig) -> bool:
    """Return whether positions are parameters, one row each."""
    return look_up(POSITION_TABLE, model.positions, "model.positions", "the parameter table")


@lru_cache(maxsize=64)
def parameter_table(
    model: ModelConfig, *, first_layer: int = 0, last_layer: int | None = None
) -> tuple[ParameterSpec, ...]:
    """Return the parameters in the order of the model's `state_dict()`.

    The model may be a slice, layers `first_layer` up to and without `last_layer` (n_layers when
    absent). The embeddings belong to the slice that begins at 0; the final norm and the head to
    the one that ends at n_layers. A tied head is the token embedding: a slice that has the head
    without the embeddings has `token_embedding.weight` too, under that name.

    Raises:
        ConfigError: `vocab_size` is not set.
        ValueError: the layer range is empty or leaves the model.
    """
    first_layer, last_layer = layer_range(model, first_layer, last_layer)
    is_first, is_last = first_layer == 0, last_layer == model.n_layers
    rows, D = padded_vocab_size(model), model.d_model
    ends = _ends(model)
    table: list[ParameterSpec] = []
    if is_first or (is_last and model.tied_head):
        table.append(_matrix("token_embedding.weight", (rows, D), ("vocab", "embed"), ends))
    if is_first and has_position_table(model):
        shape = (model.context_length, D)
        table.append(_matrix("position_embedding.weight", shape, ("position", "embed"), ends))
    for layer in range(first_layer, last_layer):
        table.extend(_block(model, layer))
    if is_last:
        if has_final_norm(model):
            table.extend(_norm(model, "final_norm", None))
        if not model.tied_head:
            table.append(_matrix("head.weight", (rows, D), ("vocab", "embed"), ends))
        if model.head_bias:
            table.append(_bias("head.bias", rows, "vocab"))
    return tuple(table)


@lru_cache(maxsize=64)
def operations(model: ModelConfig, layers: range | None = None) -> tuple[Operation, ...]:
    """Return the operations of a slice of the model (all of it when absent), as they run.

    Raises:
        ConfigError: `vocab_size` is not set.
        ValueError: the layer range is empty or leaves the model.
    """
    layers = range(model.n_layers) if layers is None else layers
    table = parameter_table(model, first_layer=layers.start, last_layer=layers.stop)
    build = _Operations(model, {spec.name: spec for spec in table})
    if layers.start == 0:
        build.embedding()
    for layer in layers:
        build.block(layer)
    if layers.stop == model.n_layers:
        build.head()
    return tuple(build.found)


def residual_stream(model: ModelConfig, name: str) -> ActivationTensor:
    """Return the tensor that blocks hand on, (T, D) of each sequence, under a name of its own."""
    shape = (model.context_length, model.d_model)
    return ActivationTensor(name, shape, ("time", "embed"), "weights")


def even_sizes(model: ModelConfig) -> dict[Axis, dict[str, int]]:
    """Return what must divide into equal parts where an axis is divided, by key of `[model]`."""
    return {
        "heads": {"n_heads": model.n_heads},
        "kv_heads": {"n_kv_heads": n_kv_heads(model)},
        "mlp": {"d_ff": feed_forward_width(model)},
    }


def layer_range(model: ModelConfig, first_layer: int, last_layer: int | None) -> tuple[int, int]:
    """Return the slice (first_layer, last_layer), the latter n_layers when absent, checked.

    Raises:
        ValueError: the range is empty or leaves the model.
    """
    last_layer = model.n_layers if last_layer is None else last_layer
    if not 0 <= first_layer < last_layer <= model.n_layers:
        raise ValueError(
            f"layers {first_layer} … {last_layer} must be a non-empty range within "
            f"0 … n_layers={model.n_layers}"
        )
    return first_layer, last_layer


def _matrix(
    name: str,
    shape: tuple[int, int],
    axes: tuple[Axis, Axis],
    init: Init,
    layer: int | None = None,
) -> ParameterSpec:
    return ParameterSpec(name, shape, axes, init, True, layer)


def _bias(name: str, n: int, axis: Axis, layer: int | None = None) -> ParameterSpec:
    return ParameterSpec(name, (n,), (axis,), Init("zeros"), False, layer)


def _scale(name: str, n: int, axis: Axis, layer: int | None) -> ParameterSpec:
    return ParameterSpec(f"{name}.weight", (n,), (axis,), Init("ones"), False, layer)


def _norm(model: ModelConfig, name: str, layer: int | None) -> Iterator[ParameterSpec]:
    D = model.d_model
    yield _scale(name, D, "embed", layer)
    if norm_has_bias(model):
        yield _bias(f"{name}.bias", D, "embed", layer)


def _block(model: ModelConfig, layer: int) -> Iterator[ParameterSpec]:
    D, d_ff = model.d_model, feed_forward_width(model)
    H, G, K = model.n_heads, n_kv_heads(model), head_size(model)
    attention = f"blocks.{layer}.attention"

    def linear(
        name: str, shape: tuple[int, int], axes: tuple[Axis, Axis], *, bias: bool
    ) -> Iterator[ParameterSpec]:
        init = _projection(model, name, shape)
        yield _matrix(f"blocks.{layer}.{name}.weight", shape, axes, init, layer)
        if bias:
            yield _bias(f"blocks.{layer}.{name}.bias", shape[0], axes[0], layer)

    yield from _norm(model, f"blocks.{layer}.attention_norm", layer)
    if shares_kv_heads(model):
        yield from linear("attention.q", (H * K, D), ("heads", "embed"), bias=model.qkv_bias)
        yield from linear(
            "attention.kv", (2 * G * K, D), ("kv_heads", "embed"), bias=model.qkv_bias
        )
    else:
        yield from linear("attention.qkv", (3 * H * K, D), ("heads", "embed"), bias=model.qkv_bias)
    match model.qk_norm:
        case None:
            pass
        case "head":
            yield _scale(f"{attention}.q_norm", K, "head", layer)
            yield _scale(f"{attention}.k_norm", K, "head", layer)
        case "width":
            yield _scale(f"{attention}.q_norm", H * K, "heads", layer)
            yield _scale(f"{attention}.k_norm", G * K, "kv_heads", layer)
        case unknown:
            refuse_unknown(unknown, "model.qk_norm", "the parameter table")
    yield from linear("attention.out", (D, H * K), ("embed", "heads"), bias=model.bias)
    yield from _norm(model, f"blocks.{layer}.mlp_norm", layer)
    if has_gate(model):
        yield from linear("mlp.gate", (d_ff, D), ("mlp", "embed"), bias=model.bias)
    yield from linear("mlp.up", (d_ff, D), ("mlp", "embed"), bias=model.bias)
    yield from linear("mlp.down", (D, d_ff), ("embed", "mlp"), bias=model.bias)


def _ends(model: ModelConfig) -> Init:
    """Return how embeddings and head start: N(0, init_std), or U(±0.1)."""
    match model.init:
        case "normal":
            return Init("normal", model.init_std)
        case "uniform":
            return Init("uniform", 0.1)
        case unknown:
            refuse_unknown(unknown, "model.init", "the parameter table")


def _projection(model: ModelConfig, name: str, shape: tuple[int, int]) -> Init:
    """Return how a block's matrix starts; `uniform` follows PyTorch's encoder layer.

    Its linear layers are U(±n_in^-0.5). Its fused query, key and value projection is Xavier's
    U(±(6 / (n_in + n_out))^0.5) (Glorot and Bengio, 2010), of the fused matrix.
    """
    n_out, n_in = shape
    scale = 1.0
    if model.residual_init_scale and name in ("attention.out", "mlp.down"):
        # GPT-2: 2 · n_layers sums on the residual stream keep its variance (Radford et al., 2019).
        scale = (2 * model.n_layers) ** -0.5
    match model.init:
        case "normal":
            return Init("normal", model.init_std * scale)
        case "uniform" if name == "attention.qkv":
            return Init("uniform", math.sqrt(6 / (n_in + n_out)))
        case "uniform":
            return Init("uniform", n_in**-0.5 * scale)
        case unknown:
            refuse_unknown(unknown, "model.init", "the parameter table")


class _Operations:
    """Appends operations to `found`, as they run; `layer` is the block they belong to, or None."""

    def __init__(self, model: ModelConfig, specs: Mapping[str, ParameterSpec]) -> None:
        self.model = model
        self.specs = specs
        self.layer: int | None = None
        self.found: list[Operation] = []

    def embedding(self) -> None:
        """Rows of tokens and of positions, whose sum is the residual stream."""
        for name in ("token_embedding", "position_embedding"):
            if f"{name}.weight" in self.specs:
                self.matrix(name, "look_up", (), residual_stream(self.model, name))
        self.dropout("embedding_dropout", embedding_dropout(self.model))

    def block(self, layer: int) -> None:
        """Attention and feed-forward; the stream is normed before each, with what it adds, or what
        it adds is."""
        self.layer = layer
        stream = x = residual_stream(self.model, f"blocks.{layer}")
        for name, add_sub_layer in (("attention", self.attention), ("mlp", self.mlp)):
            path = f"blocks.{layer}.{name}"
            total = residual_stream(self.model, f"{path} and the stream")
            match self.model.norm_position:
                case "pre":
                    reads = stream if self.model.parallel_residual else x
                    add_sub_layer(path, self.norm(f"{path}_norm", reads))
                    x = total
                case "post":
                    add_sub_layer(path, x)
                    x = self.norm(f"{path}_norm", total)
                case "output":
                    add_sub_layer(path, x)
                    self.norm(f"{path}_norm", residual_stream(self.model, f"{path}.added"))
                    x = total
                case unknown:
                    refuse_unknown(unknown, "model.norm_position", "the list of operations")
        self.layer = None

    def head(self) -> None:
        """The final norm, and logits with their loss."""
        x = residual_stream(self.model, "blocks")
        if has_final_norm(self.model):
            x = self.norm("final_norm", x)
        weight = "token_embedding" if self.model.tied_head else "head"
        logits = self.computed("head", padded_vocab_size(self.model), "vocab")
        self.matrix("head", "head", (x,), logits, weight=weight)

    def attention(self, path: str, x: ActivationTensor) -> None:
        """Causal self-attention; without dropout of its weights they are never written out."""
        T, H = self.model.context_length, self.model.n_heads
        width = H * head_size(self.model)
        reads = self.attention_inputs(path, x)
        result = self.computed(path, width, "heads")
        sums = self.computed(f"{path}.exponential_sums", H, "heads", "float32")
        by_blocks: tuple[ActivationTensor, ...] = (*reads, result, sums)
        saves = by_blocks
        if self.model.attention_dropout:
            saves = (
                *reads,
                self.computed(f"{path}.scaled_queries", width, "heads"),
                self.computed(f"{path}.weights", H * T, "heads", "softmax"),
                self.computed(f"{path}.mask", H * T, "heads", "bool"),
                self.computed(f"{path}.weights_left", H * T, "heads"),
            )
        assert self.layer is not None
        n_seen = window(self.model, self.layer) or T
        n_products = 2 * width * n_seen  # q·kᵀ and the weights' product with v, nothing masked
        self.add(
            path,
            "attention",
            reads,
            result,
            saves=saves,
            saves_by_blocks=by_blocks,
            token_products=n_products,
        )
        self.linear(f"{path}.out", result)
        self.dropout(f"{path}.dropout", self.model.dropout)

    def attention_inputs(self, path: str, x: ActivationTensor) -> tuple[ActivationTensor, ...]:
        """Queries, keys and values: as the matrices made them, which is in one tensor where heads
        share none, or each in its own where queries and keys are normed or turned."""
        model = self.model
        q_width, kv_width = (n * head_size(model) for n in (model.n_heads, n_kv_heads(model)))
        names = ("q", "kv") if shares_kv_heads(model) else ("qkv",)
        made = tuple(self.linear(f"{path}.{name}", x) for name in names)
        q, k = made[0], made[-1]
        kv_axis = k.axes[1]
        if model.qk_norm is not None:
            q = self.head_norm(f"{path}.q_norm", q, q_width)
            k = self.head_norm(f"{path}.k_norm", k, kv_width)
        if model.positions == "rotary":
            q = self.turned(f"{path}.q_turned", q, q_width)
            k = self.turned(f"{path}.k_turned", k, kv_width)
        if q is made[0]:
            return made
        return q, k, self.computed(f"{path}.v", kv_width, kv_axis)

    def head_norm(self, name: str, x: ActivationTensor, width: int) -> ActivationTensor:
        """A norm of queries or keys, which are `width` of the channels of x."""
        result = self.computed(name, width, x.axes[1])
        saves = (replace(result, name=f"{name}.input", dtype="weights"),)
        self.add(name, "norm", (x,), result, parameters=self.parameters(name), saves=saves)
        return result

    def turned(self, name: str, x: ActivationTensor, width: int) -> ActivationTensor:
        """Queries or keys, `width` of the channels of x, turned by their positions."""
        result = self.computed(name, width, x.axes[1])
        self.add(name, "rotation", (x,), result)
        return result

    def mlp(self, path: str, x: ActivationTensor) -> None:
        """The feed-forward layer."""
        names = ("gate", "up") if has_gate(self.model) else ("up",)
        reads = tuple(self.linear(f"{path}.{name}", x) for name in names)
        activated = self.computed(f"{path}.activation", reads[0].shape[1], "mlp")
        saves: tuple[ActivationTensor, ...]
        if has_gate(self.model):
            saves = (*reads, replace(activated, name=f"{path}.gate.activation"))
        else:
            name = self.model.activation
            slope_of_input = look_up(SAVES_INPUT, name, "model.activation", "the operations")
            saves = reads if slope_of_input else (activated,)
        self.add(f"{path}.activation", "activation", reads, activated, saves=saves)
        self.linear(f"{path}.down", activated)
        self.dropout(f"{path}.dropout", self.model.dropout)

    def norm(self, name: str, x: ActivationTensor) -> ActivationTensor:
        """A norm, and what it makes of the stream."""
        result = residual_stream(self.model, name)
        self.add(name, "norm", (x,), result, parameters=self.parameters(name), saves=(x,))
        return result

    def linear(self, name: str, x: ActivationTensor) -> ActivationTensor:
        """A matrix product with a parameter, and its result."""
        weight = self.specs[f"{name}.weight"]
        result = self.computed(name, weight.shape[0], weight.axes[0])
        self.matrix(name, "product", (x,), result)
        return result

    def matrix(
        self,
        name: str,
        kind: OperationKind,
        reads: tuple[ActivationTensor, ...],
        result: ActivationTensor,
        weight: str | None = None,
    ) -> None:
        """An operation with a matrix, which is multiplied or looked up in. It saves what it reads
        as products read it: all tokens, in the products' dtype."""
        parameters = self.parameters(name, weight)
        contracts = parameters[0].axes[0 if kind == "look_up" else 1]
        saves = tuple(replace(x, axes=("context", x.axes[1]), dtype="products") for x in reads)
        self.add(name, kind, reads, result, parameters=parameters, contracts=contracts, saves=saves)

    def dropout(self, name: str, rate: float) -> None:
        """Dropout of what is added to the stream: its mask is kept."""
        if rate:
            x = residual_stream(self.model, name)
            mask = replace(x, name=f"{name}.mask", dtype="bool")
            self.add(name, "dropout", (x,), x, saves=(mask,))

    def computed(
        self, name: str, width: int, axis: Axis, dtype: ActivationType = "products"
    ) -> ActivationTensor:
        """A tensor between matrix products, of all tokens: (T, width)."""
        shape = (self.model.context_length, width)
        return ActivationTensor(name, shape, ("context", axis), dtype)

    def parameters(self, name: str, weight: str | None = None) -> tuple[ParameterSpec, ...]:
        """Weight and, where there is one, bias of a module; the weight may be another's."""
        names = (f"{weight or name}.weight", f"{name}.bias")
        return tuple(self.specs[each] for each in names if each in self.specs)

    def add(self, name: str, kind: OperationKind, *tensors: Any, **costs: Any) -> None:
        """Append an operation with its `reads` and `result`; `costs` are the rest of its fields."""
        self.found.append(Operation(name, kind, self.layer, *tensors, **costs))
