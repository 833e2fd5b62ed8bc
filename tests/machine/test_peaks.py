import time

import pytest
import torch

from pentameter.errors import ConfigError
from pentameter.machine.peaks import measure_matmul


def test_a_matmul_is_measured_as_a_rate():
    rate = measure_matmul("cpu", torch.float32, seconds=0.05)
    # one core of the slowest machine in use does a GFLOP/s, the fastest processor 100 TFLOP/s
    assert 1e8 < rate < 1e14


def test_it_keeps_to_its_time():
    start = time.perf_counter()
    measure_matmul("cpu", torch.bfloat16, seconds=0.1)
    assert time.perf_counter() - start < 5  # a loaded machine


def test_a_type_that_cannot_be_multiplied():
    with pytest.raises(ConfigError, match="does not multiply"):
        measure_matmul("cpu", torch.bool, seconds=0.01)
