"""The list of operations against the model that is built: what it multiplies, and what it saves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pentameter.config.schema import Config, ModelConfig
from pentameter.estimating.bytes.communication import step_communication
from pentameter.estimating.bytes.costs import ActivationBytes, Step
from pentameter.estimating.bytes.memory import step_memory
from pentameter.model.dropout import dropout_keys
from pentameter.model.experts import GroupedLinear, Router
from pentameter.model.gpt import GPT, TiedHead, build_model
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.gpt import operations, parameter_table
from pentameter.planning.layouts import sharding as shardings
from pentameter.planning.layouts.layout import Layout
from pentameter.planning.layouts.layout_checks import check_layout
from pentameter.planning.plan import make_plan
from pentameter.planning.sub_layers.attention import SINK_CHANNELS

B, T, D, L, V = 2, 16, 24, 3, 40
STATISTICS = 2 * 2 * 4 * B * T
"""Bytes of the mean and deviation of a block's two norms, which are not counted."""
BASE = ModelConfig(
    vocab_size=V, context_length=T, n_layers=L, n_heads=4, d_model=D, bias=True, qkv_bias=True
)
VARIANTS: dict[str, dict[str, object]] = {
    "gpt2": {},
    "feed-forward": {"feed_forward.width": 56, "feed_forward.activation": "relu"},
    "post-norm": {"norm_position": "post", "norm": "rmsnorm", "positions": "sinusoidal"},
    "untied": {"tied_head": False, "head_bias": True, "vocab_multiple": 32},
    "llama": {
        "attention.n_kv_heads": 2,
        "positions": "rotary",
        "norm": "rmsnorm",
        "feed_forward.activation": "swiglu",
        "tied_head": False,
    },
    "qwen3": {
        "attention.n_kv_heads": 1,
        "attention.head_size": 10,
        "attention.qk_norm": "head",
        "positions": "rotary",
    },
    "olmo2": {
        "norm_position": "output",
        "attention.qk_norm": "width",
        "feed_forward.activation": "geglu",
    },
    "gemma": {
        "attention.n_kv_heads": 2,
        "attention.qk_norm": "head",
        "attention.score_size": 20,
        "positions": "rotary",
        "norm": "rmsnorm",
        "norm_position": "both",
        "feed_forward.activation": "geglu_tanh",
    },
    "nope": {"positions": "rotary", "nope_layers": 2, "attention.n_kv_heads": 2},
    "scaled": {"attention.score_size": 20},
    "scaled groups": {"attention.score_size": 20, "attention.n_kv_heads": 2},
    "gpt-neox": {"parallel_residual": True, "positions": "rotary", "rotary_fraction": 1 / 3},
    "relu2": {"feed_forward.activation": "relu2", "logit_softcap": 3.0},
    "dropout": {"dropout": 0.1, "attention.dropout": 0.1},
    "experts": {
        "experts.count": 4,
        "experts.width": 20,
        "feed_forward.activation": "swiglu",
        "experts.n_shared": 1,
    },
    "gpt-oss": {
        "attention.n_kv_heads": 2,
        "attention.sinks": True,
        "feed_forward.activation": "swiglu_clamped",
        "experts.count": 4,
        "experts.width": 20,
        "router.bias": True,
        "positions": "rotary",
    },
    "latent": {
        "attention.type": "latent",
        "positions": "rotary",
        "attention.rope_head_size": 2,
        "attention.v_head_size": 8,
    },
    "latent queries": {
        "attention.type": "latent",
        "positions": "rotary",
        "norm": "rmsnorm",
        "attention.head_size": 10,
        "attention.kv_rank": 14,
        "attention.q_rank": 12,
        "attention.rope_head_size": 4,
        "attention.v_head_size": 14,
    },
    "balanced experts": {
        "experts.count": 8,
        "experts.per_token": 3,
        "experts.shared_gate": True,
        "experts.n_shared": 2,
        "router.balance": "bias",
        "experts.dense_layers": 1,
    },
}


@dataclass(frozen=True)
class TwoTensorDimensions(Layout):
    """A layout with a second tensor dimension, which no engine has yet."""

    tensor_rows: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "tensor_rows": self.tensor_rows}


def variant(name: str) -> ModelConfig:
    return BASE.updated(VARIANTS[name])


def resolved(model: ModelConfig, stream: str = "weights") -> Config:
    """A configuration with nothing left to be derived."""
    precision = "fp32" if stream == "weights" else stream
    train = {"batch_size": B, "micro_batch_size": B, "precision": precision, "stream": stream}
    values = {"model": model.model_dump(), "data": {"corpus": "grammar"}, "train": train}
    return make_plan(Config.model_validate(values)).config


def a_step(model: GPT) -> torch.Tensor:
    """The loss of a batch (B, T), with dropout where the model has some."""
    config = model.config
    device = next(model.parameters()).device
    tokens = torch.zeros(B, T, dtype=torch.int64, device=device)
    keys = None
    if config.dropout or config.attention_dropout:
        keys = dropout_keys(config, 1, 0, range(B)).to(device)
    loss: torch.Tensor = model(tokens, targets=tokens, dropout_keys=keys)
    return loss


def of_grouped_linear(x: torch.Size, weight: torch.Size, *_others: object, **_named: object) -> int:
    """FLOPs of rows (R, K) that each meet one matrix of a weight (E, N, K)."""
    return 2 * x[0] * weight[1] * weight[2]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_product_of_the_model_is_in_the_list(name: str) -> None:
    """PyTorch counts 2 FLOPs for each multiplication, and attention in full."""
    config = variant(name)
    run = operations(config)
    model = build_model(config, 0, dtype=torch.float32).train()
    # The counter knows the products of this form, but not attention's own kernel on a CPU.
    custom = {torch.ops.pentameter.grouped_linear: of_grouped_linear}
    with (
        FlopCounterMode(display=False, custom_mapping=custom) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        a_step(model)
    n_products = sum(op.weight_products + op.token_products for op in run)
    if config.attention_sinks:  # the sinks' key, and the channels beside it, are no FLOPs of a plan
        K, H = config.head_channels, config.n_heads
        n_products += L * 2 * H * ((K + SINK_CHANNELS) * (T + 1) - K * T)
    assert counter.get_total_flops() == 2 * B * T * n_products


@pytest.mark.parametrize("name", VARIANTS)
def test_every_matrix_and_norm_is_one_operation(name: str) -> None:
    config = variant(name)
    run = operations(config)
    modules = dict(build_model(config, 0).named_modules())
    kinds = {
        "product": (nn.Linear, Router, GroupedLinear),
        "norm": (nn.LayerNorm, nn.RMSNorm),
        "head": TiedHead,
        "look_up": nn.Embedding,
    }
    for kind, classes in kinds.items():
        listed = {op.name for op in run if op.kind == kind}
        built = {path for path, module in modules.items() if isinstance(module, classes)}
        assert listed - {"head"} == built - {"head"}
    used = {spec for op in run for spec in op.parameters}
    assert used == set(parameter_table(config))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (2, 3)])
def test_a_slice_runs_its_part_of_the_list(name: str, layers: tuple[int, int]) -> None:
    config = variant(name)
    whole = operations(config)
    part = operations(config, range(*layers))
    assert set(part) <= set(whole)
    assert {op.layer for op in part} - {None} == set(range(*layers))


def saved_by_a_block(config: ModelConfig, stream: torch.dtype | None = None) -> int:
    """Bytes that one block more saves for backward: storages, parameters not counted; with a
    `stream`, under autocast to that dtype."""
    kept = []
    for n_layers in (2, 3):
        model = build_model(config.model_copy(update={"n_layers": n_layers}), 0).train()
        model.stream_dtype = stream
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor, parameters=parameters, storages=storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage
            return tensor

        with (
            saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", stream, enabled=stream is not None),
        ):
            loss = a_step(model)
        kept.append(sum(storage.nbytes() for storage in storages.values()))
        del loss
    return kept[1] - kept[0]


@pytest.mark.parametrize("name", ["gpt2", "feed-forward", "untied"])
def test_a_block_saves_what_the_list_says(name: str) -> None:
    model = variant(name)
    assert saved_by_a_block(model) == planned_of_a_block(model)


@pytest.mark.parametrize("name", ["experts", "gpt-oss"])
def test_a_block_of_experts_saves_nearly_what_the_list_says(name: str) -> None:
    """In float32 a router saves no copy of its input, which shared experts save, too, and a few
    integers per token are not counted."""
    model = variant(name)
    planned = planned_of_a_block(model) - 4 * B * T * D * (model.experts.n_shared > 0)
    if model.attention.sinks:  # their key is one token more, and the batch has one mask
        planned += 4 * (2 * B * model.attention.kv_heads * (model.head_channels + SINK_CHANNELS))
        planned -= 4 * (B - 1) * T * (T + 1)
    assert saved_by_a_block(model) == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize(
    "changes", [{}, {"norm_position": "post"}, {"parallel_residual": True}, {"dropout": 0.1}]
)
def test_a_block_saves_what_the_list_says_of_a_stream_in_bf16(changes: dict[str, object]) -> None:
    """A norm's input is widened before it, once where two norms read it."""
    model = BASE.updated(changes)
    block = [op for op in operations(model) if op.layer == 1]
    planned = ActivationBytes(Step(resolved(model, "bf16"), Layout())).kept_of_block(block)
    assert saved_by_a_block(model, torch.bfloat16) == planned + STATISTICS


def planned_of_a_block(model: ModelConfig) -> int:
    """Planned bytes that one block saves for backward."""
    costs = ActivationBytes(Step(resolved(model), Layout()))
    block = [op for op in operations(model) if op.layer == 1]
    planned = costs.of(tensor for op in block for tensor in op.saves)
    return planned + STATISTICS


@pytest.fixture
def divided_twice(monkeypatch: pytest.MonkeyPatch) -> Config:
    """A configuration, where from then on `embed` is divided over `tensor_rows`."""
    config = resolved(variant("gpt2"))
    axes = {**shardings.AXIS_DIMENSIONS, "embed": ("tensor_rows",)}
    monkeypatch.setattr(shardings, "AXIS_DIMENSIONS", axes)
    return config


def halved(spec: ParameterSpec) -> tuple[int, ...]:
    """The shape of a parameter whose axes are divided by two each, but for positions."""
    sizes = zip(spec.shape, spec.axes, strict=True)
    return tuple(n if axis == "position" else n // 2 for n, axis in sizes)


def test_a_second_dimension_divides_a_second_axis(divided_twice: Config) -> None:
    """One entry in the dictionary of axes, and one size: checks, memory and traffic follow."""
    layout = TwoTensorDimensions(tensor=2, tensor_rows=2)
    assert layout.world_size == 4
    check_layout(layout, divided_twice)
    table = parameter_table(divided_twice.model)
    sharding = shardings.sharding_of(layout, divided_twice.model)
    assert all(sharding.parameter_shape(spec) == halved(spec) for spec in table)
    memory = step_memory(Step(divided_twice, layout, [range(L)]))
    here = sum(math.prod(halved(spec)) for spec in table)
    assert memory.weights_bytes == memory.gradients_bytes == 4 * here
    assert memory.optimizer_bytes == 2 * memory.weights_bytes
    half = step_memory(Step(divided_twice, TwoTensorDimensions(tensor=2), [range(L)]))
    assert memory.activations_bytes < half.activations_bytes
    sent = step_communication(Step(divided_twice, layout, [range(L)]))
    # Forward: the two products of a layer that sum over `embed`, and the head; backward: the
    # gradients of what the other two read.
    assert sent["tensor_rows", "all_reduce"].calls == 4 * L + 1


def test_shards_divide_what_two_dimensions_have_divided(divided_twice: Config) -> None:
    layout = TwoTensorDimensions(data=2, zero=3, tensor=2, tensor_rows=2)
    memory = step_memory(Step(divided_twice, layout, [range(L)]))
    parts = [halved(spec) for spec in parameter_table(divided_twice.model)]
    here = sum(math.ceil(part[0] / 2) * math.prod(part[1:]) for part in parts)
    assert memory.weights_bytes == 4 * here
