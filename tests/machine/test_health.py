"""A device that computes or remembers wrongly is found out."""

from __future__ import annotations

import pytest
import torch

from pentameter.machine import health
from pentameter.machine.health import measure_health

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_device_that_is_well(dtype):
    found = measure_health(CPU, dtype)
    assert found.faults == ()
    assert found.product_flops > 1e8
    assert found.copied_bytes_per_second > 1e7


@pytest.mark.parametrize("wrong", [0.5, -1.0, float("nan")])
def test_a_wrong_product_is_counted(monkeypatch, wrong):
    multiply = health.multiply

    def damaged(left, right):
        product = multiply(left, right)
        product[3, 7] += wrong
        return product

    monkeypatch.setattr(health, "multiply", damaged)
    (fault,) = measure_health(CPU, torch.float32).faults
    assert fault == "computes wrong products: 1 of 262,144 elements differ"


def test_a_bit_that_sticks_is_found_whatever_it_is(monkeypatch):
    def damaged(written, pattern):
        written.copy_(pattern)
        written[11] |= 4

    monkeypatch.setattr(health, "copy", damaged)
    (fault,) = measure_health(CPU, torch.float32).faults
    assert fault == "reads other bytes than it wrote: 1 of 2,097,152 words differ"
