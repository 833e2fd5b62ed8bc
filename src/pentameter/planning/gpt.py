"""A GPT's parameters and operations: embeddings, blocks that are lists of sub-layers, head.

Sharding, initialization, weight decay and checkpoints read the parameter table. FLOPs, memory,
communication and the balance between pipeline stages are sums over the operation list
(`planning/flops.py`, `estimating/`). Tests hold the table equal to the built model's
`state_dict()`, and the operations equal to the matmuls that the model runs and the tensors that it
saves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from pentameter.config.choices import NORM_NAMES, look_up, refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import (
    Axis,
    Collective,
    Init,
    Operation,
    ParameterSpec,
    residual_stream,
)
from pentameter.planning.sub_layers.attention import ATTENTION
from pentameter.planning.sub_layers.building import ZEROS, OperationList, SubLayer, norm, vector
from pentameter.planning.sub_layers.experts import EXPERTS
from pentameter.planning.sub_layers.feed_forward import FEED_FORWARD
from pentameter.planning.sub_layers.latent_attention import LATENT_ATTENTION

ATTENTIONS = {"multi_head": ATTENTION, "latent": LATENT_ATTENTION}
"""Value for `model.attention.type` → its sub-layer."""


def sub_layers(model: ModelConfig, layer: int) -> tuple[SubLayer, ...]:
    """Return the sub-layers in block number `layer`, in execution order: attention, then experts or
    a feed-forward layer."""
    key = "model.attention.type"
    attention = look_up(ATTENTIONS, model.attention.type, key, "the parameter table")
    return attention, EXPERTS if model.experts.are_in(layer) else FEED_FORWARD


def norm_names(model: ModelConfig, path: str) -> list[str]:
    """Return the names of the norms of the sub-layer called `path`, such as `mlp`, in the order of
    the model's modules."""
    key = "model.norm_position"
    names = look_up(NORM_NAMES, model.norm_position, key, "the parameter table")
    return [name.format(path) for name in names]


@lru_cache(maxsize=64)
def parameter_table(
    model: ModelConfig, *, first_layer: int = 0, last_layer: int | None = None
) -> tuple[ParameterSpec, ...]:
    """Return the parameters in the order of the model's `state_dict()`.

    The model may be a slice, from layer `first_layer` up to but not including `last_layer`
    (n_layers when absent). The embeddings belong to the slice that starts at 0, the final norm and
    the head to the slice that ends at n_layers. A tied head is the token embedding: a slice with
    the head but not the embeddings also has `token_embedding.weight`, under that name.

    Raises:
        ConfigError: `vocab_size` is not set.
        ValueError: the layer range is empty or exceeds the model.
    """
    first_layer, last_layer = layer_range(model, first_layer, last_layer)
    is_first, is_last = first_layer == 0, last_layer == model.n_layers
    rows, D = model.padded_vocab_size, model.d_model
    ends = _ends(model)
    axes: tuple[Axis, Axis] = ("vocab", "embed")
    table: list[ParameterSpec] = []
    if is_first or (is_last and model.tied_head):
        table.append(ParameterSpec("token_embedding.weight", (rows, D), axes, ends, True))
    if is_first and model.has_position_table:
        shape = (model.context_length, D)
        positions = ParameterSpec(
            "position_embedding.weight", shape, ("position", "embed"), ends, True
        )
        table.append(replace(positions, sums_over=("time",)))
    for layer in range(first_layer, last_layer):
        for sub_layer in sub_layers(model, layer):
            path = f"blocks.{layer}.{sub_layer.name}"
            for name in norm_names(model, path):
                table.extend(norm(model, name, layer))
            table.extend(sub_layer.parameters(model, path, layer))
    if is_last:
        if model.has_final_norm:
            table.extend(norm(model, "final_norm", None))
        if not model.tied_head:
            table.append(ParameterSpec("head.weight", (rows, D), axes, ends, True))
        if model.head_bias:
            table.append(vector("head.bias", rows, "vocab", ZEROS, None))
    return tuple(table)


@lru_cache(maxsize=64)
def operations(model: ModelConfig, layers: range | None = None) -> tuple[Operation, ...]:
    """Return the forward operations in the layers `layers` (None: the whole model), in execution
    order. The embedding comes with layer 0, the final norm and the head with the last layer.

    Raises ConfigError if `vocab_size` is not set, and ValueError if the layer range is empty or
    exceeds the model.
    """
    layers = range(model.n_layers) if layers is None else layers
    table = parameter_table(model, first_layer=layers.start, last_layer=layers.stop)
    build = OperationList(model, {spec.name: spec for spec in table})
    if layers.start == 0:
        _add_embedding(build)
    for layer in layers:
        _add_block(build, layer)
    if layers.stop == model.n_layers:
        _add_head(build)
    return tuple(build.found)


def layer_range(model: ModelConfig, first_layer: int, last_layer: int | None) -> tuple[int, int]:
    """Return (first_layer, last_layer) for a slice, with n_layers if the latter is None. Raises
    ValueError if the range is empty or exceeds the model."""
    last_layer = model.n_layers if last_layer is None else last_layer
    if not 0 <= first_layer < last_layer <= model.n_layers:
        raise ValueError(
            f"layers {first_layer} … {last_layer} must be a non-empty range within "
            f"0 … n_layers={model.n_layers}"
        )
    return first_layer, last_layer


def _ends(model: ModelConfig) -> Init:
    """Return the initialization of the embeddings and the head: a normal distribution N(0,
    init_std) if `model.init` is 'normal', U(±0.1) if it is 'uniform'."""
    match model.init:
        case "normal":
            return Init("normal", model.init_std)
        case "uniform":
            return Init("uniform", 0.1)
        case unknown:
            refuse_unknown(unknown, "model.init", "the parameter table")


def _add_embedding(build: OperationList) -> None:
    """Add the look-ups in the token embedding, and in the position embedding if there is one, to
    `build`, then the dropout on their sum, which is the residual stream."""
    for name in ("token_embedding", "position_embedding"):
        if f"{name}.weight" in build.specs:
            build.matrix(name, "look_up", (), residual_stream(build.model, name, "weights"))
    build.dropout("embedding_dropout", build.model.embedding_dropout_rate)


def _add_block(build: OperationList, layer: int) -> None:
    """Add one block's operations, sub-layer by sub-layer, to `build`. `model.norm_position` places
    the norm: 'pre' ahead of each sub-layer, 'post' on the stream after the sub-layer was added,
    'output' on the sub-layer's result before it is added, 'both' a norm ahead and one there."""
    model, build.layer = build.model, layer
    stream = x = residual_stream(model, f"blocks.{layer}")
    for sub_layer in sub_layers(model, layer):
        path = f"blocks.{layer}.{sub_layer.name}"
        total = residual_stream(model, f"{path} and the stream")
        match model.norm_position:
            case "pre":
                reads = stream if model.parallel_residual else x
                sub_layer.add_operations(build, path, build.norm(f"{path}_norm", reads))
                x = total
            case "post":
                sub_layer.add_operations(build, path, x)
                x = replace(build.norm(f"{path}_norm", total), dtype="stream")
            case "both":
                sub_layer.add_operations(build, path, build.norm(f"{path}_norm", x))
                build.norm(f"{path}_output_norm", residual_stream(model, f"{path}.added"))
                x = total
            case "output":
                sub_layer.add_operations(build, path, x)
                build.norm(f"{path}_norm", residual_stream(model, f"{path}.added"))
                x = total
            case unknown:
                refuse_unknown(unknown, "model.norm_position", "the list of operations")
    build.layer = None


def _add_head(build: OperationList) -> None:
    """Add the final norm, if there is one, and the head, which multiplies with the token embedding
    if tied: logits together with their loss."""
    model = build.model
    x = residual_stream(model, "blocks")
    if model.has_final_norm:
        x = build.norm("final_norm", x)
    weight = "token_embedding" if model.tied_head else "head"
    logits = build.computed("head", model.padded_vocab_size, "vocab")
    loss = (Collective("softmax", "vocab", logits),)
    build.matrix("head", "head", (x,), logits, weight, loss)
