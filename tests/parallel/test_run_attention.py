"""The choice of a run's attention, and what stands against the kernels that drop its weights."""

from __future__ import annotations

import sys

import pytest
import torch

from pentameter.config.schema import ModelConfig
from pentameter.machine.capabilities import GpuCapabilities
from pentameter.parallel.context.run_attention import chip_obstacle, kernel_obstacle

MODEL = ModelConfig(
    vocab_size=5, context_length=300, n_layers=2, n_heads=2, d_model=32, attention_dropout=0.2
)


def test_whatever_breaks_is_a_reason_and_no_error(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pentameter.model.attention.dropout_kernels", None)
    obstacle = kernel_obstacle(MODEL, torch.float32, torch.device("cpu"))
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
