"""The loss scale of fp16, and what is silenced where precision is decided."""

import subprocess
import sys

from pentameter.parallel.precision import LossScale


def test_loss_scale_halves_on_overflow_and_doubles_after_enough_good_steps():
    scale = LossScale(scale=8.0, growth_interval=3)
    scale.update(finite=False)
    assert scale.scale == 4.0
    for _ in range(3):
        scale.update(finite=True)
    assert scale.scale == 8.0
    for _ in range(20):
        scale.update(finite=False)
    assert scale.scale == 1.0


def test_a_norm_whose_weights_are_finer_than_its_input_is_no_warning():
    code = """
import sys, torch
from pentameter.parallel.precision import set_matmul_precision
if sys.argv[1:]:
    set_matmul_precision(None, "bf16")
torch.nn.functional.rms_norm(torch.ones(2, 4, dtype=torch.bfloat16), (4,), torch.ones(4))
"""
    loud, silent = (
        subprocess.run(
            [sys.executable, "-c", code, *told], capture_output=True, text=True, check=True
        ).stderr
        for told in ([], ["silence"])
    )
    assert "Mismatch dtype" in loud
    assert not silent
