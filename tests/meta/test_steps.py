"""A whole step and evaluations of every kind of model, and of every way to train it, on a device
without memory: a GPU's host waits nowhere but for numbers that it needs, and nothing mixes devices.

A step is forward and backward passes, norm, guard, clipping and update. Every key of `[model]`
stands in a case, and every word that it may have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from on_meta import META, TINY, Device, Making, Mixes, Waits, config_of, read_by_experts, run_step
from torch import Tensor, nn

from pentameter.config.fields import choices_of, leaves
from pentameter.data.batches.step import Batch
from pentameter.model.gpu.forms import GpuForms
from pentameter.parallel.sources.custom_model import OwnModel

ROTARY = {"model.positions": "rotary"}
EXPERTS = {"model.experts.count": 4, "model.experts.width": 8}
LATENT = {**ROTARY, "model.attention.type": "latent"}

MODELS: dict[str, dict[str, Any]] = {
    "as by default": {},
    "biases, an untied head": {
        "model.bias": True,
        "model.head_bias": True,
        "model.attention.qkv_bias": True,
        "model.attention.out_bias": False,
        "model.tied_head": False,
        "model.vocab_multiple": 24,
        "model.init": "uniform",
        "model.init_std": 0.1,
        "model.residual_init_scale": True,
        "model.embedding_scale": True,
    },
    "dropout": {
        "model.dropout": 0.1,
        "model.embedding_dropout": 0.2,
        "model.attention.dropout": 0.3,
    },
    "norms of the outputs": {
        **ROTARY,
        "model.norm": "rmsnorm",
        "model.norm_position": "output",
        "model.norm_eps": 1e-6,
        "model.rope_theta": 500.0,
        "model.rotary_fraction": 0.5,
        "model.attention.n_kv_heads": 2,
        "model.attention.head_size": 8,
        "model.attention.qk_norm": "width",
        "model.feed_forward.activation": "swiglu",
        "model.feed_forward.width": 24,
        "model.logit_softcap": 15.0,
    },
    "norms on both sides, bases by layer": {
        **ROTARY,
        "model.norm": "rmsnorm",
        "model.norm_position": "both",
        "model.window_rope_theta": 100.0,
        "model.nope_layers": 2,
        "model.attention.n_kv_heads": 2,
        "model.attention.sliding_window": 5,
        "model.attention.sliding_window_pattern": 2,
        "model.attention.score_size": 24,
        "model.feed_forward.activation": "geglu_tanh",
    },
    "as in 2017": {
        "model.norm_position": "post",
        "model.positions": "sinusoidal",
        "model.feed_forward.activation": "relu",
    },
    "rotary positions by length": {
        **ROTARY,
        "model.rope_scaling.type": "dynamic",
        "model.rope_scaling.original_context_length": 4,
    },
    "rotary factors by length": {
        **ROTARY,
        "model.rope_scaling.type": "longrope",
        "model.rope_scaling.original_context_length": 4,
        "model.rope_scaling.short_factors": (1.5, 1.5),
        "model.rope_scaling.long_factors": (2.0, 8.0),
    },
    "both sub-layers at once": {
        **ROTARY,
        "model.parallel_residual": True,
        "model.attention.qk_norm": "head",
        "model.feed_forward.activation": "gelu_tanh",
        "model.rope_scaling.type": "linear",
        "model.rope_scaling.factor": 2.0,
    },
    "windows": {
        **ROTARY,
        "model.attention.n_kv_heads": 2,
        "model.attention.sliding_window": 5,
        "model.attention.sliding_window_pattern": 2,
        "model.feed_forward.activation": "geglu",
        "model.rope_scaling.type": "llama3",
        "model.rope_scaling.low_frequency_factor": 2.0,
        "model.rope_scaling.high_frequency_factor": 8.0,
        "model.rope_scaling.original_context_length": 8,
    },
    "sinks": {
        **ROTARY,
        "model.attention.n_kv_heads": 2,
        "model.attention.sinks": True,
        "model.attention.sliding_window": 5,
        "model.feed_forward.activation": "swiglu_clamped",
        "model.feed_forward.swiglu_alpha": 1.5,
        "model.feed_forward.swiglu_limit": 6.0,
        "model.rope_scaling.type": "yarn",
        "model.rope_scaling.beta_fast": 16.0,
        "model.rope_scaling.beta_slow": 2.0,
        "model.rope_scaling.truncate": False,
        "model.rope_scaling.attention_factor": 1.1,
    },
    "latent attention": {
        **LATENT,
        "model.attention.kv_rank": 8,
        "model.attention.q_rank": 12,
        "model.attention.rope_head_size": 2,
        "model.attention.v_head_size": 5,
        "model.feed_forward.activation": "relu2",
        "model.rope_scaling.type": "yarn",
        "model.rope_scaling.mscale": 0.7,
        "model.rope_scaling.mscale_all_dim": 0.7,
    },
    "experts": {
        **EXPERTS,
        "model.experts.per_token": 3,
        "model.experts.n_shared": 2,
        "model.experts.shared_gate": True,
        "model.experts.dense_layers": 1,
        "model.experts.capacity": 1.0,
        "model.router.bias": True,
        "model.router.scale": 2.0,
        "model.router.z_loss": 0.1,
        "model.router.balance": "sequence",
        "model.router.balance_weight": 0.1,
    },
    "groups of experts": {
        **EXPERTS,
        "model.experts.count": 8,
        "model.router.groups": 4,
        "model.router.open_groups": 2,
        "model.router.group_scores": 1,
        "model.router.score_function": "sigmoid",
        "model.router.renormalize": True,
        "model.router.balance": "bias",
        "model.router.balance_rate": 0.01,
    },
    "experts balanced over the batch": {
        **EXPERTS,
        "model.router.top_k_first": True,
        "model.router.balance": "batch",
    },
}
ALIKE_ON_META = {"model.context_length", "model.n_layers", "model.d_model", "model.vocab_size"}

TRAININGS: dict[str, dict[str, Any]] = {
    "Adam, all decays": {"optimizer.name": "adam", "optimizer.decay": "all"},
    "SGD": {"optimizer.name": "sgd"},
    "SGD with momentum": {"optimizer.name": "sgd", "optimizer.momentum": 0.9},
    "Muon": {"optimizer.name": "muon"},
    "Muon of experts": {"optimizer.name": "muon", **EXPERTS},
    "a guard": {"guard.spike_factor": 20.0},
    "a guard, at once": {"guard.spike_factor": 20.0, "optimizer.name": "sgd"},
    "adapters": {"lora.rank": 2},
    "adapters beside experts": {"lora.rank": 2, "lora.targets": ("qkv", "out"), **EXPERTS},
    "all recomputed": {"train.activation_checkpoint": "full"},
    "some recomputed": {"train.activation_checkpoint": "selective"},
    "recomputed experts": {"train.activation_checkpoint": "full", **EXPERTS},
    "some of experts recomputed": {"train.activation_checkpoint": "selective", **EXPERTS},
    "recomputed latents": {"train.activation_checkpoint": "selective", **LATENT},
    "bf16": {"train.precision": "bf16"},
    "a stream in bf16": {"train.precision": "bf16", "train.stream": "bf16", **EXPERTS},
    "tf32": {"train.precision": "tf32"},
    "fp16": {"train.precision": "fp16"},
    "fp64": {"train.precision": "fp64", **EXPERTS},
}
READ_AT_ONCE = {"SGD", "SGD with momentum", "Muon", "Muon of experts", "a guard, at once", "fp16"}
"""Trainings whose host reads each step's loss and norm before the update: the optimizer leaves no
step out on the device, or the loss scale depends on them."""


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_a_model_waits_for_experts_at_most(settings):
    config = config_of(settings)
    assert run_step(config) == read_by_experts(config)


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_waits_for_its_numbers_at_most(name):
    config = config_of(TRAININGS[name])
    numbers = {"numbers": 1} if name in READ_AT_ONCE else {}
    assert run_step(config) == numbers | read_by_experts(config)


@pytest.mark.parametrize("recomputed", [None, "full", "selective"])
def test_experts_multiplied_at_once_wait_nowhere(monkeypatch, recomputed):
    for room in ("experts", "matmul"):  # meta has no autocast, which says so
        monkeypatch.setattr(f"pentameter.model.{room}.matmul_dtype", lambda x: torch.bfloat16)
    settings = {**EXPERTS, "train.precision": "bf16", "train.activation_checkpoint": recomputed}
    assert run_step(config_of(settings), forms=GpuForms(experts_at_once=True)) == {}


def test_a_loss_in_chunks_waits_nowhere(monkeypatch):
    monkeypatch.setattr("pentameter.model.loss.MAX_LOGITS", 64)
    assert run_step(config_of({"model.logit_softcap": 15.0})) == {}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precise_sums_wait_nowhere(precision):
    numbers = {"numbers": 1} if precision == "fp16" else {}
    config = config_of({"train.precision": precision})
    assert run_step(config, forms=GpuForms(precise_sums=True)) == numbers


@pytest.mark.parametrize("counted", [0.5, 0.0], ids=["answers alone", "no target at all"])
def test_masked_targets_wait_nowhere(counted):
    tokens = np.zeros((4, TINY["model.context_length"]), dtype=np.int64)
    targets = np.where(np.arange(tokens.shape[1]) < counted * tokens.shape[1], tokens, -1)
    batch = Batch(tokens, np.broadcast_to(targets, tokens.shape).copy(), np.arange(4))
    assert run_step(config_of({}), batch=batch) == {}


class Regression(nn.Module):
    """A user's module with a loss of its own, a tree of inputs, a dropout and a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mean", torch.full((3,), 0.5))

    def forward(self, inputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        x = F.dropout(inputs["numbers"] - self.mean, 0.1, self.training) * inputs["scale"]
        return F.mse_loss(self.layer(x), targets, reduction="sum")


def test_a_custom_model_waits_nowhere():
    inputs = {"numbers": np.zeros((4, 3)), "scale": np.ones((4, 1))}
    batch = Batch(inputs, np.zeros((4, 2)), np.arange(4), count=8)
    source = OwnModel(lambda config: Regression())
    assert run_step(config_of({}), batch=batch, source=source) == {}


# -- the table -------------------------------------------------------------------------------------


def test_every_key_of_the_model_is_in_the_table():
    said = {path: {case[path] for case in MODELS.values() if path in case} for path in KEYS}
    missing = {path for path in KEYS if not said[path] - {leaves()[path].default}}
    assert missing == ALIKE_ON_META | {"model.attention.n_heads"}


KEYS = [path for path in leaves() if path.startswith("model.")]


@pytest.mark.parametrize(
    "path",
    [*KEYS, "optimizer.name", "train.activation_checkpoint", "train.precision", "train.stream"],
)
def test_every_word_is_in_the_table(path):
    words = {word for option in leaves()[path].options for word in choices_of(option)}
    cases = [*MODELS.values(), *TRAININGS.values()]
    said = {case.get(path, leaves()[path].default) for case in cases} | {"auto"}
    said |= {"fp32"} if path == "train.precision" else set()  # which auto stands for here
    assert words <= said


# -- what the device refuses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "refused"),
    [
        (lambda x: x.sum().item(), RuntimeError),
        (lambda x: x.tolist(), NotImplementedError),
        (lambda x: x.cpu(), NotImplementedError),
        (lambda x: x[x > 0], NotImplementedError),
        (lambda x: x.nonzero(), NotImplementedError),
        (lambda x: x @ torch.ones(4, 4), Mixes),
        (lambda x: x[torch.tensor([0, 1])], Mixes),
        (lambda x: torch.cat([x.sum()[None], torch.zeros(1)]), Mixes),
        (lambda x: torch.stack([x.sum(), torch.zeros(())]), Mixes),
        (lambda x: torch.ones(4).to(META), Waits),
        (lambda x: x.copy_(torch.ones(4, 4)), Waits),
        (lambda x: torch.tensor(1.0, device=META), Waits),
    ],
)
def test_what_waits_or_mixes_is_refused(compute, refused):
    x = torch.empty(4, 4, device=META)
    with Device(), Making(), pytest.raises(refused):
        compute(x)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 2 + torch.tensor(3.0),  # a number of the host is an argument of the kernel
        lambda x: torch.ones(4).to(META, non_blocking=True),
        lambda x: x.copy_(torch.ones(4, 4), non_blocking=True),
        lambda x: torch.full((2,), 3.0, device=META),
        lambda x: torch.where(x > 0, x, 0),
    ],
)
def test_what_does_neither_is_not(compute):
    x = torch.empty(4, 4, device=META)
    with Device(), Making():
        compute(x)
