"""The choice of a run's attention, and what stands against the kernels that drop its weights."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from pentameter.config.schema import ModelConfig
from pentameter.machine.capabilities import GpuCapabilities
from pentameter.model.gpu.forms import obstacle_of
from pentameter.parallel.context import ring_attention, run_attention
from pentameter.parallel.context.block_kernels import block_kernel
from pentameter.parallel.context.run_attention import (
    chip_obstacle,
    kernel_obstacle,
    ring_obstacle,
)

SIZES = {"vocab_size": 5, "context_length": 300, "n_layers": 2, "n_heads": 2, "d_model": 32}
MODEL = ModelConfig(**SIZES, attention_dropout=0.2)


def test_whatever_breaks_is_a_reason_and_no_error(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pentameter.model.attention.dropout_kernels", None)
    obstacle = obstacle_of(partial(kernel_obstacle, MODEL, torch.float32, torch.device("cpu")))
    assert obstacle is not None
    assert obstacle.startswith(
        "ModuleNotFoundError: import of pentameter.model.attention.dropout_kernels"
    )


@pytest.mark.parametrize(
    ("name", "architecture", "said"),
    [
        ("NVIDIA A100", "sm_80", None),
        ("NVIDIA H100", "sm_90", None),
        ("Tesla T4", "sm_75", "they need compute capability 8.0, and Tesla T4 has 7.5"),
        ("AMD Instinct MI300X", "gfx942", None),
        ("AMD Radeon RX 7900", "gfx1100", "not gfx1100"),
    ],
)
def test_chips_without_matrix_units_for_the_kernels_are_left_out(name, architecture, said) -> None:
    obstacle = chip_obstacle(GpuCapabilities(name, architecture, 80 * 10**9))
    assert obstacle is None if said is None else said in obstacle


CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", [{}, {"n_kv_heads": 1}, {"sliding_window": 64}])
def test_a_ring_whose_kernels_are_right_runs_by_them(dtype, model):
    assert ring_obstacle(ModelConfig(**SIZES, **model), dtype, CPU) is None


def test_a_ring_without_kernels_or_with_wrong_ones_writes_weights_out(monkeypatch):
    right = block_kernel("cpu", None, torch.float32, 16)

    def says(attend):
        monkeypatch.setattr(
            ring_attention, "block_kernel", lambda *_: right._replace(attend=attend)
        )
        return ring_obstacle(MODEL, torch.float32, CPU)

    def causal_alone(q, k, v, is_causal):
        return right.attend(q, k, v, True)

    def raising(*arguments):
        raise RuntimeError("no kernel found to launch!")

    assert says(causal_alone).startswith("their y is off by ")
    with pytest.raises(RuntimeError, match="no kernel found to launch!"):
        says(raising)
    monkeypatch.setattr(run_attention, "block_kernel", lambda *_: None)
    said = "none gives log-sum-exps in torch.float64 for heads of 16 channels"
    assert ring_obstacle(MODEL, torch.float64, CPU) == said
