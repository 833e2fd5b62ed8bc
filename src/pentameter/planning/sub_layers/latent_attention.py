"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"): its parameters and operations.

A token's keys and values are linear functions of a latent, `kv_rank` numbers, and queries may be of
another, `q_rank` numbers. The latents, and the rotated key that all heads share, belong to the
residual stream's tokens: a tensor-parallel rank computes them for its own tokens, and needs those
of all tokens for its heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import ActivationTensor, Axis, Collective, ParameterSpec
from pentameter.planning.sub_layers.attention import add_attend, add_rotation
from pentameter.planning.sub_layers.building import ONES, OperationList, SubLayer, linear, vector


def _parameters(model: ModelConfig, path: str, layer: int) -> Iterator[ParameterSpec]:
    """Yield the sub-layer's parameters, whose names begin with `path`: the projections to the
    latents, their norms, those from the latents to heads, and the output's."""
    D, H, C = model.d_model, model.attention.n_heads, model.latent_channels
    q_width, v_width = H * model.query_channels, H * model.value_channels
    if model.attention.q_rank is None:
        yield from _projection(model, f"{path}.q", layer, q_width, D, "embed")
    else:
        yield from _to_latent(model, f"{path}.q_down", layer, model.attention.q_rank)
        yield _latent_norm(f"{path}.q_norm", layer, model.attention.q_rank)
        yield from _projection(model, f"{path}.q", layer, q_width, model.attention.q_rank, "latent")
    yield from _to_latent(model, f"{path}.kv_down", layer, C + model.rope_channels)
    yield _latent_norm(f"{path}.kv_norm", layer, C)
    kv_width = H * model.head_channels + v_width
    yield from _projection(model, f"{path}.kv", layer, kv_width, C, "latent")
    yield from linear(
        model, f"{path}.out", layer, (D, v_width), ("embed", "heads"), bias=model.out_bias
    )


def _projection(
    model: ModelConfig, path: str, layer: int, n_outputs: int, n_inputs: int, axis: Axis
) -> Iterator[ParameterSpec]:
    """Yield the parameters (H · …, n_inputs) of the linear layer that computes some channels of
    every head from a latent or from the stream. `axis` is the inputs' axis, `latent` or `embed`."""
    shape = (n_outputs, n_inputs)
    yield from linear(model, path, layer, shape, ("heads", axis), bias=False)


def _to_latent(model: ModelConfig, path: str, layer: int, n: int) -> Iterator[ParameterSpec]:
    """Yield the parameters for the linear layer from the stream to a latent with n numbers. Their
    gradient is a sum over the stream's tokens: ranks that have different tokens compute partial
    sums."""
    shape: tuple[int, int] = (n, model.d_model)
    bias = model.attention.qkv_bias
    for spec in linear(model, path, layer, shape, ("latent", "embed"), bias=bias):
        yield replace(spec, sums_over=("time",))


def _latent_norm(path: str, layer: int, n: int) -> ParameterSpec:
    """Return the ParameterSpec for the weight, n numbers, of the norm over a latent (the narrow
    vector per token from which keys and values, or queries, are computed). Its gradient is a sum
    over tokens, so ranks that share a sequence add theirs."""
    return replace(vector(f"{path}.weight", n, "latent", ONES, layer), sums_over=("time",))


def _add_operations(build: OperationList, path: str, x: ActivationTensor) -> None:
    """Add latent attention's operations to `build`, from x, the normed stream (T, D), to the output
    dropout; `path` begins their names. Values are padded to the queries' size, which most fused
    kernels ask for."""
    model, H = build.model, build.model.attention.n_heads
    C, R, size = model.latent_channels, model.rope_channels, model.query_channels
    q_input = x
    if model.attention.q_rank is not None:
        q_latent = _add_latent(build, f"{path}.q_down", x, model.attention.q_rank)
        q_input = _add_norm(build, f"{path}.q_norm", q_latent, model.attention.q_rank)
    down = _add_latent(build, f"{path}.kv_down", x, C + R)
    # One message brings all that heads read: the queries' input, the latent and the shared key.
    gathered = _of_stream(build, f"{path}.gathered", q_input.shape[1] + C + R)
    gather = Collective("gather", "heads", gathered)
    kv_input = _add_norm(build, f"{path}.kv_norm", down, C, gather)
    q = _add_heads(build, f"{path}.q", q_input)
    kv = _add_heads(build, f"{path}.kv", kv_input)
    q = add_rotation(build, f"{path}.q_turned", q, H * size)
    key = build.computed(f"{path}.k_turned", H * size, "heads")
    build.add(f"{path}.k_turned", "rotation", (kv,), key)
    v = build.computed(f"{path}.v", H * size, "heads")
    values = add_attend(build, path, (q, key, v), size, size - model.value_channels)
    if model.value_channels != size:
        values = build.computed(f"{path}.values", H * model.value_channels, "heads")
    build.linear(f"{path}.out", values)
    build.dropout(f"{path}.dropout", model.dropout)


def _add_latent(build: OperationList, name: str, x: ActivationTensor, n: int) -> ActivationTensor:
    """Add to `build` a linear layer from x, the stream (T, D), to n numbers per token, computed by
    each rank for its tokens of the stream. Returns its result (T, n)."""
    result = _of_stream(build, name, n)
    build.local_matmul(name, x, result)
    return result


def _add_norm(
    build: OperationList, name: str, x: ActivationTensor, n: int, *collectives: Collective
) -> ActivationTensor:
    """Add to `build` a norm over n numbers per token, a latent or the first n of x, and return its
    result (T, n). `collectives` are recorded with it, such as the all-gather that follows."""
    result, parameters = _of_stream(build, name, n), build.parameters(name)
    saves = (replace(x, dtype="weights"),)
    build.add(
        name, "norm", (x,), result, parameters=parameters, saves=saves, collectives=collectives
    )
    return result


def _add_heads(build: OperationList, name: str, x: ActivationTensor) -> ActivationTensor:
    """Add to `build` the linear layer that computes some channels of every head from x (T, n), for
    all tokens in a sequence. Return its result (T, H · …)."""
    result = build.computed(name, build.parameters(name)[0].shape[0], "heads")
    build.local_matmul(name, x, result, reads_context=True)
    return result


def _of_stream(build: OperationList, name: str, n: int) -> ActivationTensor:
    """Return the description of an activation called `name` with n numbers for each token of the
    residual stream, (T, n)."""
    return build.computed(name, n, "latent", tokens="time")


def _even_sizes(model: ModelConfig) -> dict[Axis, dict[str, int]]:
    """Return the axes of latent attention that must be split into equal shards, which is heads
    alone: axis → key in `[model]` → size."""
    return {"heads": {"attention.n_heads": model.attention.n_heads}}


LATENT_ATTENTION = SubLayer("latent_attention", _parameters, _add_operations, _even_sizes)
