"""A whole step and evaluations of single ranks of every kind of layout, on a device without memory
and in a world without other ranks: a GPU's host waits nowhere, and nothing mixes devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_meta import config_of, read_by_experts, run_step

from pentameter.config.fields import choices_of, leaves, values_of
from pentameter.config.schema import Config
from pentameter.model.gpu.forms import GpuForms
from pentameter.parallel.context import ring_attention
from pentameter.parallel.context.block_kernels import block_kernel
from pentameter.planning.layouts.layout import layout_overrides

EXPERTS = {"model.experts.count": 4, "model.experts.width": 8}
ROTARY = {"model.positions": "rotary"}
SHARED_HEADS = {**ROTARY, "model.attention.n_kv_heads": 2}
LATENT = {**ROTARY, "model.attention.type": "latent", "model.attention.q_rank": 8}
SMALL = {"train.micro_batch_size": 1}
MUON = {"optimizer.name": "muon"}

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("data=2", {}),
    ("data=2", {**EXPERTS, "model.router.balance": "bias"}),
    ("data=2", {"guard.spike_factor": 20.0}),
    ("data=2", {"lora.rank": 2}),
    ("data=2,zero=1", {}),
    ("data=2,zero=1", {"train.precision": "bf16"}),
    ("data=2,zero=2", {"model.dropout": 0.1}),
    ("data=2,zero=3", {"train.activation_checkpoint": "full"}),
    ("data=2,zero=3", {**EXPERTS, "model.experts.n_shared": 1}),
    ("data=2,zero=3", {"lora.rank": 2}),
    ("data=4,zero=3,replicate=2", SMALL),
    ("tensor=2", {}),
    ("tensor=2", SHARED_HEADS),
    ("tensor=2", {"model.tied_head": False, "model.bias": True, "model.head_bias": True}),
    ("tensor=2,sequence=1", {"model.dropout": 0.1, "model.attention.dropout": 0.1}),
    ("tensor=2,sequence=1", LATENT),
    ("tensor=2,sequence=1", {"train.activation_checkpoint": "selective"}),
    ("tensor=2,sequence=1", {**ROTARY, "model.attention.qk_norm": "width"}),
    ("tensor=2,zero=3,data=2", {}),
    ("tensor=4,tensor_mode=2d", {}),
    ("tensor=8,tensor_mode=2.5d,tensor_depth=2", SMALL),
    ("tensor=8,tensor_mode=3d", {**SMALL, "model.dropout": 0.1}),
    ("context=2", {"model.attention.dropout": 0.1}),
    ("context=2", {**SHARED_HEADS, "model.attention.sliding_window": 5}),
    ("context=2,context_mode=all-to-all", SHARED_HEADS),
    ("context=2,zero=3,data=2", {"train.activation_checkpoint": "selective"}),
    ("pipeline=2,schedule=gpipe", {}),
    ("pipeline=2", {"model.dropout": 0.1}),
    ("pipeline=2,schedule=zero-bubble", {}),
    ("pipeline=2,schedule=interleaved,virtual_stages=2", {**SMALL, "model.n_layers": 4}),
    ("pipeline=2,schedule=zero-bubble-v,virtual_stages=2", {**SMALL, "model.n_layers": 4}),
    ("pipeline=2", {"model.tied_head": False, "parallel.partition": "weighted"}),
    ("pipeline=2,tensor=2", {}),
    ("pipeline=2,data=2,zero=1", SMALL),
    ("data=2,expert=2", EXPERTS),
    ("data=2,expert=2", {**EXPERTS, "train.activation_checkpoint": "full"}),
    ("data=2,expert_tensor=2", EXPERTS),
    ("data=4,zero=3,expert=2", {**EXPERTS, **SMALL, "model.router.balance": "batch"}),
    ("tensor=2,sequence=1,expert=2", {**EXPERTS, "model.router.balance": "sequence"}),
    ("context=2,expert=2", EXPERTS),
]
FIRST = [case for case in LAYOUTS if "pipeline" in case[0] or not case[1]]
"""Layouts whose first rank is tried, too: it counts the norm of replicas, and has other layers."""
AT_ONCE: list[tuple[str, dict[str, Any]]] = [
    ("data=2", MUON),
    ("data=2,zero=1", MUON),
    ("tensor=2", MUON),
    ("data=2,expert=2", {**EXPERTS, **MUON}),
    ("data=4,zero=3,expert=2", {**EXPERTS, **SMALL, "train.precision": "fp16"}),
    ("data=2,zero=1", {"optimizer.name": "sgd", "optimizer.momentum": 0.9}),
]


def config_on(text: str, settings: dict[str, Any]) -> Config:
    layout = layout_overrides(text)
    return config_of({"model.n_layers": layout["parallel.pipeline"], **layout, **settings})


@pytest.mark.parametrize(("text", "settings"), LAYOUTS, ids=str)
def test_the_last_rank_waits_for_experts_at_most(text, settings):
    config = config_on(text, settings)
    assert run_step(config, -1) == read_by_experts(config)


@pytest.mark.parametrize(("text", "settings"), FIRST, ids=str)
def test_the_first_rank_waits_nowhere(text, settings):
    assert run_step(config_on(text, settings), 0) == {}


@pytest.mark.parametrize("settings", [{}, SHARED_HEADS], ids=str)
@pytest.mark.parametrize("capability", [90, 70])
def test_a_fused_ring_waits_nowhere(monkeypatch, capability, settings):
    of_a_gpu = block_kernel("cuda", capability, torch.float16, 64)
    assert of_a_gpu is not None
    chosen = []
    monkeypatch.setattr(ring_attention, "block_kernel", lambda *_: chosen.append(1) or of_a_gpu)
    config = config_on("context=2", {**settings, "train.precision": "fp32"})
    assert run_step(config, -1, forms=GpuForms(fused_ring=True)) == {}
    assert chosen


@pytest.mark.parametrize(("text", "settings"), AT_ONCE, ids=str)
def test_a_rank_waits_for_its_numbers_once(text, settings):
    assert run_step(config_on(text, settings), -1) == {"numbers": 1}


def test_every_degree_and_way_is_in_the_table():
    cases = [values_of(config_on(*case)) for case in LAYOUTS]
    for path, leaf in leaves().items():
        if not path.startswith("parallel.") or path == "parallel.timeout_seconds":
            continue
        said = {case[path] for case in cases}
        words = {word for option in leaf.options for word in choices_of(option)}
        assert words <= said, path
        assert said - {leaf.default}, path
