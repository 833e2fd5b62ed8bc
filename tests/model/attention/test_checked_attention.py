"""The look at the kernels that drop attention's weights, before a run computes with them."""

from __future__ import annotations

import pytest
import torch

from pentameter.config.schema import ModelConfig
from pentameter.model.attention import checked_attention
from pentameter.model.attention.checked_attention import disagreement
from pentameter.model.dropout import keep_bound
from pentameter.planning.fused_step import dropout_kernel_obstacle
from pentameter.planning.layouts.layout import Layout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODEL = ModelConfig(
    vocab_size=5,
    context_length=300,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    d_model=32,
    attention_dropout=0.2,
)


@pytest.fixture
def multiplied_bf16(monkeypatch):
    """Without a GPU: have Triton's interpreter multiply bf16, which it takes for whole numbers."""
    if DEVICE.type == "cuda":
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        numbers = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda builder, a, b, *others: multiply(builder, widened(a), widened(b), *others),
    )


def test_kernels_that_are_right_are_taken(kernels) -> None:
    assert disagreement(kernels.KernelAttention(), MODEL, torch.float16, DEVICE) is None
    few = MODEL.model_copy(update={"context_length": 1})  # of which no query has a gradient
    assert disagreement(kernels.KernelAttention(), few, torch.float32, DEVICE) is None


def test_every_window_is_looked_at(kernels, multiplied_bf16, monkeypatch) -> None:
    windows = []

    def seen(attention, problem):
        windows.append(problem.how.window)
        return compared(attention, problem)

    compared = checked_attention._disagreement
    monkeypatch.setattr(checked_attention, "_disagreement", seen)
    model = MODEL.updated({"attention.sliding_window": 40, "attention.sliding_window_pattern": 2})
    assert disagreement(kernels.KernelAttention(), model, torch.bfloat16, DEVICE) is None
    assert windows == [None, 40]


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("keep_bound", lambda p: keep_bound(p) + 2**28),
        ("LOG2_E", 1.4),
        ("_strides", None),
    ],
)
def test_kernels_that_are_wrong_are_refused(kernels, monkeypatch, name, planted) -> None:
    strides = kernels._strides

    def of_others(*tensors):
        return strides(*(x[:, :, :1].expand_as(x) for x in tensors))

    monkeypatch.setattr(kernels, name, planted or of_others)
    obstacle = disagreement(kernels.KernelAttention(), MODEL, torch.float16, DEVICE)
    assert obstacle is not None
    assert "is off by" in obstacle


def test_latent_attention_is_checked_with_the_channels_that_it_runs_with() -> None:
    sizes = {"vocab_size": 5, "context_length": 8, "n_layers": 1, "n_heads": 2, "d_model": 16}
    latent = {"attention": "latent", "positions": "rotary", "kv_rank": 8, "rope_head_size": 64}
    wide = ModelConfig(**sizes, **latent, head_size=128, attention_dropout=0.1)
    obstacle = dropout_kernel_obstacle(wide, Layout(), "bf16")
    assert obstacle == "heads of 192 channels, more than 128"
    narrow = ModelConfig(**sizes, **latent, head_size=32, attention_dropout=0.1)
    assert dropout_kernel_obstacle(narrow, Layout(), "bf16") is None
    problem = checked_attention._problem(narrow, torch.float32, torch.device("cpu"), None)
    assert problem.q.shape[-1] == problem.v.shape[-1] == narrow.query_channels == 96
