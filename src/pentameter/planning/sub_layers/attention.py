"""Causal self-attention: its parameters and operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import ActivationTensor, Axis, Collective, Init, ParameterSpec
from pentameter.planning.sub_layers.building import ONES, OperationList, SubLayer, linear, vector

SINK_CHANNELS = 8
"""Channels added to queries, keys and values of a model with sinks. The first holds the sink's
score; there are 8 because attention kernels need a multiple of 8."""


def projections(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map each projection's name to what it computes for a head: 0 queries, 1 keys, 2 values. One
    fused matrix computes all three, unless several query heads use the same keys and values: these
    then have a matrix of their own."""
    return {"q": (0,), "kv": (1, 2)} if model.attention.shares_kv_heads else {"qkv": (0, 1, 2)}


def _parameters(model: ModelConfig, path: str, layer: int) -> Iterator[ParameterSpec]:
    attention, D, K = model.attention, model.d_model, model.head_channels
    H, G = attention.n_heads, attention.kv_heads
    for name, parts in projections(model).items():
        axes: tuple[Axis, Axis] = ("heads" if 0 in parts else "kv_heads", "embed")
        where, shape = f"{path}.{name}", (len(parts) * (H if 0 in parts else G) * K, D)
        bias, is_fused = attention.qkv_bias, len(parts) == 3
        yield from linear(model, where, layer, shape, axes, bias=bias, is_fused=is_fused)
    match attention.qk_norm:
        case None:
            pass
        case "head":
            yield vector(f"{path}.q_norm.weight", K, "head", ONES, layer, "heads")
            yield vector(f"{path}.k_norm.weight", K, "head", ONES, layer, "kv_heads")
        case "width":
            yield vector(f"{path}.q_norm.weight", H * K, "heads", ONES, layer)
            yield vector(f"{path}.k_norm.weight", G * K, "kv_heads", ONES, layer)
        case unknown:
            refuse_unknown(unknown, "model.attention.qk_norm", "the parameter table")
    if model.attention.sinks:
        init = Init("normal", model.init_std)
        yield vector(f"{path}.sinks.weight", H, "heads", init, layer)
    yield from linear(
        model, f"{path}.out", layer, (D, H * K), ("embed", "heads"), bias=model.out_bias
    )


def _add_operations(build: OperationList, path: str, x: ActivationTensor) -> None:
    """Add attention's operations to `build`, from the projections of x, (T, D), to the output
    dropout. `path` is the module's path, such as `blocks.0.attention`."""
    model = build.model
    reads = _add_inputs(build, path, x)
    if model.attention.sinks:
        reads = _add_sinks(build, f"{path}.sinks", reads)
    result = add_attend(build, path, reads, model.head_channels)
    build.linear(f"{path}.out", result)
    build.dropout(f"{path}.dropout", model.dropout)


def add_attend(
    build: OperationList,
    path: str,
    reads: tuple[ActivationTensor, ...],
    n_channels: int,
    n_padded: int = 0,
) -> ActivationTensor:
    """Add the operation that computes softmax(q·kᵀ)·v from `reads`, queries, keys and values with
    `n_channels` per head each, and return its result (T, H · n_channels). The last `n_padded`
    channels of values are zeros, which no FLOP counts. Attention weights are materialized only if
    they have dropout."""
    model = build.model
    T, H = model.context_length, model.attention.n_heads
    width = H * n_channels
    result = build.computed(path, width, "heads")
    sums = build.computed(f"{path}.exponential_sums", H, "heads", "float32")
    assert build.layer is not None
    window = model.window(build.layer)
    by_blocks: tuple[ActivationTensor, ...] = (*reads, result, sums)
    if model.attention.sinks:  # the kernel keeps a result with their channels, and a mask
        kept = build.computed(f"{path}.sinks.result", width + H * SINK_CHANNELS, "heads")
        masks = () if window else (build.computed(f"{path}.sinks.mask", T + 1, "head"),)
        by_blocks = (*reads, kept, sums, *masks)
    saves = by_blocks
    if model.attention.dropout:
        saves = (
            *reads,
            build.computed(f"{path}.scaled_queries", width, "heads"),
            build.computed(f"{path}.weights", H * T, "heads", "softmax"),
            build.computed(f"{path}.mask", H * T, "heads", "bool"),
            build.computed(f"{path}.weights_left", H * T, "heads"),
        )
    build.add(
        path,
        "attention",
        reads,
        result,
        saves=saves,
        saves_by_blocks=by_blocks,
        collectives=(Collective("attend", "context", result),),
        # q·kᵀ and weights·v, ignoring the mask
        token_products=(2 * width - H * n_padded) * (window or T),
    )
    return result


def _add_inputs(
    build: OperationList, path: str, x: ActivationTensor
) -> tuple[ActivationTensor, ...]:
    """Add to `build` the projections of x, (T, D), to queries, keys and values, and the norms and
    rotations that the model applies to queries and keys.

    Returns the tensors that attention then reads. If queries and keys are normalized or rotated,
    these are q, k and v; if not, the projections' outputs: one fused tensor, or the queries and a
    tensor with keys and values.
    """
    model = build.model
    q_width, kv_width = (
        n * model.head_channels for n in (model.attention.n_heads, model.attention.kv_heads)
    )
    made = tuple(build.linear(f"{path}.{name}", x) for name in projections(model))
    assert build.layer is not None
    q, k = made[0], made[-1]
    kv_axis = k.axes[1]
    if model.attention.qk_norm is not None:
        q = _add_head_norm(build, f"{path}.q_norm", q, q_width)
        k = _add_head_norm(build, f"{path}.k_norm", k, kv_width)
    if model.rotates_by(build.layer) is not None:
        q = add_rotation(build, f"{path}.q_turned", q, q_width)
        k = add_rotation(build, f"{path}.k_turned", k, kv_width)
    is_apart = k is not made[-1]
    if model.query_factor != 1.0:
        scaled = build.computed(f"{path}.q_scaled", q_width, q.axes[1])
        build.add(f"{path}.q_scaled", "rotation", (q,), scaled)
        q = scaled
    if not is_apart:
        return made if q is made[0] else (q, made[-1])
    return q, k, build.computed(f"{path}.v", kv_width, kv_axis)


def _add_sinks(
    build: OperationList, name: str, reads: tuple[ActivationTensor, ...]
) -> tuple[ActivationTensor, ...]:
    """Add the operation that puts each head's sink beside its keys, and return what attention then
    reads: queries, keys and values with SINK_CHANNELS more channels."""
    model = build.model
    G, n_channels = model.attention.kv_heads, model.head_channels + SINK_CHANNELS
    kv_axis = reads[-1].axes[1]
    q = build.computed(f"{name}.q", model.attention.n_heads * n_channels, "heads")
    k, v = (build.computed(f"{name}.{each}", G * n_channels, kv_axis) for each in "kv")
    build.add(name, "sinks", reads, q, parameters=build.parameters(name))
    return q, k, v


def _add_head_norm(
    build: OperationList, name: str, x: ActivationTensor, width: int
) -> ActivationTensor:
    """Add to `build` the norm that the model applies to queries or to keys, and return its result.
    `width` is the number of their channels, over all heads; x may hold further channels beside
    them."""
    result, parameters = build.computed(name, width, x.axes[1]), build.parameters(name)
    saves = (replace(result, name=f"{name}.input", dtype="weights"),)
    collectives: tuple[Collective, ...] = ()
    if parameters[0].axes != ("head",):  # which would normalize one head
        squares = build.computed(f"{name}.mean_squares", 1, "head", "softmax")
        collectives = (Collective("mean_squares", x.axes[1], squares),)
    build.add(
        name, "norm", (x,), result, parameters=parameters, saves=saves, collectives=collectives
    )
    return result


def add_rotation(
    build: OperationList, name: str, x: ActivationTensor, width: int
) -> ActivationTensor:
    """Add to `build` the rotary embedding of queries or of keys, and return its result. `width` is
    the number of their channels, over all heads; x may hold further channels beside them."""
    result = build.computed(name, width, x.axes[1])
    build.add(name, "rotation", (x,), result)
    return result


def _even_sizes(model: ModelConfig) -> dict[Axis, dict[str, int]]:
    return {
        "heads": {"attention.n_heads": model.attention.n_heads},
        "kv_heads": {"attention.n_kv_heads": model.attention.kv_heads},
    }


ATTENTION = SubLayer("attention", _parameters, _add_operations, _even_sizes)
