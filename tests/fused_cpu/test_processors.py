"""The fused step as processors other than this one take it: AMX hidden, AVX-512 hidden, AVX2, none.

What PyTorch's operations, PyTorch's compiler and our own C++ choose by the processor is chosen for
another one, in a process of its own. Tiles are emulated in `test_amx.py`.
"""

import os
import subprocess
import sys

import pytest

from pentameter.machine.capabilities import machine_capabilities

STEP = """
import sys, torch
from contextlib import nullcontext
from dataclasses import replace
from torch._inductor import config as inductor
from pentameter.config.schema import ModelConfig
from pentameter.fused_cpu import native
from pentameter.fused_cpu.rehearsal import rehearse, settle
from pentameter.fused_cpu.step import fused_loss_sum
from pentameter.machine.capabilities import machine_capabilities
from pentameter.model.compiled import plainly
from pentameter.model.dropout import dropout_keys
from pentameter.model.gpt import build_model

vector, bf16, bits = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])
inductor.cpp.simdlen = bits
here = machine_capabilities()
assert here.cpu.vector == vector, here.cpu.vector  # as ATEN_CPU_CAPABILITY says
cpu = replace(here.cpu, amx_bf16=False, avx512_bf16=bf16)
pretended = replace(here, cpu=cpu)
missing = native.load("vector", pretended)
assert (missing is None) is (vector != "DEFAULT"), missing
assert native.load("AMX", pretended) == "the CPU has no AMX"
config = ModelConfig(
    vocab_size=13, context_length=32, n_layers=1, n_heads=2, d_model=64,
    dropout=0.2, attention_dropout=0.1, bias=True, qkv_bias=True,
)
how = nullcontext if sys.argv[4] == "True" else plainly
with how():
    settle([rehearse(config, torch.bfloat16, 4, pretended)], pretended)
tokens = torch.randint(13, (4, 32), generator=torch.Generator().manual_seed(1))
keys = dropout_keys(config, 0, 0, range(4))

def gradients(parameters, dtype):
    model = build_model(config, 0, dtype=parameters).train()
    fused_loss_sum(model, tokens, tokens.roll(1, 1), keys, dtype).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double()

with plainly():
    exact = gradients(torch.float64, torch.float64)
with how():
    found = gradients(torch.float32, torch.bfloat16)
assert (found - exact).norm() < 0.05 * exact.norm(), (found - exact).norm() / exact.norm()
"""

PROCESSORS = {
    "AVX-512 BF16": ("AVX512", True, 512),
    "AVX-512": ("AVX512", False, 512),
    "AVX2": ("AVX2", False, 256),
    "none": ("DEFAULT", False, 1),
}
"""Name → vector instructions that PyTorch uses, whether it multiplies bf16, and the width in bits
of the registers that PyTorch's compiler fills; 1 for none."""


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_step_as_another_processor_takes_it(name, compiled):
    """Our own C++ and PyTorch's operations, in the long tier also what PyTorch compiles."""
    vector, bf16, bits = PROCESSORS[name]
    cpu = machine_capabilities().cpu
    order = ["DEFAULT", "AVX2", "AVX512"]
    if cpu.vector not in order or order.index(cpu.vector) < order.index(vector):
        pytest.skip(f"this CPU has no {vector}; {cpu.vector} is the path of this one")
    if bf16 and not cpu.avx512_bf16:
        pytest.skip("this CPU has no AVX-512 BF16")
    around = os.environ | {"ATEN_CPU_CAPABILITY": vector.lower()}
    command = [sys.executable, "-c", STEP, vector, str(bf16), str(bits), str(compiled)]
    done = subprocess.run(command, env=around, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
