"""The parameter table: every parameter of a model, from its configuration alone.

Memory, cuts, initial values, weight decay and checkpoints read this one table. A test holds it
equal to the built model's `state_dict()`, so a variant is added here and in `pentameter.model`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pentameter.config.choices import look_up, refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.errors import ConfigError

NORM_MAY_HAVE_BIAS = {"layernorm": True, "rmsnorm": False}
FINAL_NORM = {"pre": True, "post": False}
POSITION_TABLE = {"learned": True, "sinusoidal": False}

Axis = Literal["vocab", "position", "embed", "heads", "mlp"]
"""What a dimension runs over. `heads` is all heads' channels, head by head: H·K of the attention
output, or (H, 3, K) flattened of the fused query, key and value projection."""


@dataclass(frozen=True)
class Init:
    """How a parameter starts: `scale` is normal's deviation, or uniform's bound ±scale."""

    kind: Literal["normal", "uniform", "zeros", "ones"]
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

    @property
    def n_elements(self) -> int:
        """Numbers in the parameter."""
        return math.prod(self.shape)

    @property
    def is_block_matrix(self) -> bool:
        """Whether it is a matrix between layers' activations, as Muon takes: in a block, 2-D."""
        return self.layer is not None and len(self.shape) == 2


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


def _norm(model: ModelConfig, name: str, layer: int | None) -> Iterator[ParameterSpec]:
    D = model.d_model
    yield ParameterSpec(f"{name}.weight", (D,), ("embed",), Init("ones"), False, layer)
    if norm_has_bias(model):
        yield _bias(f"{name}.bias", D, "embed", layer)


def _block(model: ModelConfig, layer: int) -> Iterator[ParameterSpec]:
    D, d_ff = model.d_model, feed_forward_width(model)

    def linear(
        name: str, shape: tuple[int, int], axes: tuple[Axis, Axis], *, bias: bool
    ) -> Iterator[ParameterSpec]:
        init = _projection(model, name, shape)
        yield _matrix(f"blocks.{layer}.{name}.weight", shape, axes, init, layer)
        if bias:
            yield _bias(f"blocks.{layer}.{name}.bias", shape[0], axes[0], layer)

    yield from _norm(model, f"blocks.{layer}.attention_norm", layer)
    yield from linear("attention.qkv", (3 * D, D), ("heads", "embed"), bias=model.qkv_bias)
    yield from linear("attention.out", (D, D), ("embed", "heads"), bias=model.bias)
    yield from _norm(model, f"blocks.{layer}.mlp_norm", layer)
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
