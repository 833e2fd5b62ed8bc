"""Faster forms of a GPU's operations: their trials.

Without a GPU Triton interprets the loss's kernel, and `wide_products` stands in for a product whose
result is wider than its inputs, which PyTorch has for GPUs only.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from pentameter.model.gpu import forms
from pentameter.model.gpu.forms import (
    PLAIN_FORMS,
    GpuForms,
    loss_obstacle,
    obstacle_of,
    sums_obstacle,
)
from pentameter.model.loss import row_loss
from pentameter.model.matmul import PLAIN, PRECISE_SUMS
from pentameter.parallel.precision import arithmetic

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = (144, 139, None)


def wide(total, a, b, *, out_dtype, out):
    """`torch.addmm` with an `out_dtype`, which a CPU lacks."""
    return out.copy_(total + a.to(out_dtype) @ b.to(out_dtype))


@pytest.fixture
def wide_products(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "addmm", wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_fp32_are_taken(wide_products, dtype) -> None:
    assert sums_obstacle(dtype, DEVICE) is None


def rounded(total, a, b, *, out_dtype, out):
    return out.copy_(total + (a.float() @ b.float()).to(a.dtype))


def elsewhere(total, a, b, *, out_dtype, out):
    return total + a.float() @ b.float()


@pytest.mark.parametrize("wrong", [rounded, elsewhere])
def test_sums_that_are_rounded_or_not_added_are_left(monkeypatch, wrong) -> None:
    monkeypatch.setattr(torch, "addmm", wrong)
    reason = sums_obstacle(torch.bfloat16, DEVICE)
    assert reason is not None
    assert reason.startswith("the gradient is off by ")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="what a CPU says")
def test_what_a_device_lacks_is_a_reason_and_no_error(monkeypatch) -> None:
    reason = obstacle_of(partial(sums_obstacle, torch.bfloat16, DEVICE))
    assert reason is not None
    assert reason.startswith("NotImplementedError: ")
    monkeypatch.setitem(sys.modules, "pentameter.model.gpu.loss_kernel", None)
    reason = obstacle_of(partial(loss_obstacle, torch.float32, DEVICE, *VOCABULARY))
    assert reason is not None
    assert reason.startswith("ModuleNotFoundError: import of pentameter.model.gpu.loss_kernel")


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loss_in_one_kernel_is_taken(dtype, softcap) -> None:
    pytest.importorskip("triton")
    assert loss_obstacle(dtype, DEVICE, *VOCABULARY[:2], softcap) is None


@pytest.mark.parametrize("wrong", ["the loss", "the gradient"])
def test_a_kernel_that_is_wrong_is_left(monkeypatch, wrong) -> None:
    def planted(logits, *arguments):
        loss = row_loss(logits, *arguments)
        if wrong == "the gradient":
            logits[5, :5] *= 1.01  # numbers far below the largest
        return loss * 1.001 if wrong == "the loss" else loss

    monkeypatch.setattr(forms, "_one_pass", lambda: planted)
    reason = loss_obstacle(torch.float32, DEVICE, *VOCABULARY)
    assert reason is not None
    assert reason.startswith(f"{wrong} is off by ")


def test_forms_say_their_names_and_change_the_plain_matmul_alone() -> None:
    both = GpuForms(precise_sums=True, one_pass_loss=True)
    assert (str(PLAIN_FORMS), str(both)) == ("", "precise sums, one pass loss")
    left = replace(both, obstacles={"fused_ring": "no kernel"})
    assert str(left) == "precise sums, one pass loss · no fused ring (no kernel)"
    assert left == both
    assert arithmetic("bf16", both).matmul is PRECISE_SUMS
    assert arithmetic("bf16").matmul is PLAIN
    other = type(PLAIN)()
    assert both.matmul(other) is other
