import time

import pytest
import torch

from pentameter.errors import ConfigError
from pentameter.machine.peaks import product_ceiling


def test_a_ceiling_is_a_rate_and_is_measured_once():
    first = product_ceiling("cpu", torch.float32, seconds=0.05)
    # one core of the slowest machine in use does a GFLOP/s, the fastest processor 100 TFLOP/s
    assert 1e8 < first < 1e14
    start = time.perf_counter()
    assert product_ceiling(torch.device("cpu"), torch.float32, seconds=0.05) == first
    assert time.perf_counter() - start < 0.01


def test_it_keeps_to_its_time():
    start = time.perf_counter()
    product_ceiling("cpu", torch.bfloat16, seconds=0.1)
    assert time.perf_counter() - start < 5  # a loaded machine


def test_a_type_that_cannot_be_multiplied():
    with pytest.raises(ConfigError, match="does not multiply"):
        product_ceiling("cpu", torch.bool, seconds=0.01)
