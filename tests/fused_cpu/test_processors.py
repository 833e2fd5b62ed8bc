"""The fused step as processors other than this one take it: with AMX, AVX-512, AVX2, none.

What PyTorch's operations, PyTorch's compiler and our own C++ choose by the processor is chosen for
another one, in a process of its own. Where this one has not the other's instructions, our own C++
runs on emulated ones, and PyTorch's operations on those that there are.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from pentameter.fused_cpu import native
from pentameter.machine.capabilities import machine_capabilities

STEP = """
import json, sys, torch
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

given = json.loads(sys.argv[1])
inductor.cpp.simdlen = given["bits"]
here = machine_capabilities()
assert here.cpu.vector == given["PyTorch"], here.cpu.vector  # as ATEN_CPU_CAPABILITY says
pretended = replace(here, cpu=replace(here.cpu, **given["cpu"]))
flags = given["flags"]  # by library; those that are emulated are for any processor
native.machine_flags = lambda name, cpu: flags[name]
native.platform.machine = lambda: "x86_64"
for name in native.FILES:
    missing = native.load(name, pretended)
    assert (missing is None) is (flags[name] is not None), missing
config = ModelConfig(
    vocab_size=13, context_length=32, n_layers=1, n_heads=2, d_model=64,
    dropout=0.2, attention_dropout=0.1, bias=True, qkv_bias=True,
)
how = nullcontext if given["compiled"] else plainly
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

ORDER = ["DEFAULT", "AVX2", "AVX512"]
BITS = {"DEFAULT": 1, "AVX2": 256, "AVX512": 512}
"""Vector instructions that PyTorch uses → the width of the registers that its compiler fills; 1 for
none."""
PROCESSORS = {
    "AMX": {"vector": "AVX512", "avx512_bf16": True, "amx_bf16": True},
    "AVX-512 BF16": {"vector": "AVX512", "avx512_bf16": True, "amx_bf16": False},
    "AVX-512": {"vector": "AVX512", "avx512_bf16": False, "amx_bf16": False},
    "AVX2": {"vector": "AVX2", "avx512_bf16": False, "amx_bf16": False},
    "none": {"vector": "DEFAULT", "avx512_bf16": False, "amx_bf16": False},
}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param("AMX", marks=pytest.mark.more), *list(PROCESSORS)[1:]]
)
def test_a_step_as_another_processor_takes_it(flags_anywhere, name, compiled):
    """Our own C++ and PyTorch's operations, in the long tier also what PyTorch compiles."""
    here = machine_capabilities().cpu
    cpu = replace(here, **PROCESSORS[name])
    vector = here.vector  # ARM's has no lesser one
    if vector in ORDER:
        vector = min(vector, cpu.vector, key=ORDER.index)
    given = {
        "PyTorch": vector,
        "bits": BITS.get(vector),
        "cpu": PROCESSORS[name],
        "flags": {
            library: native.machine_flags(library, cpu) and flags_anywhere(library, cpu)
            for library in native.FILES
        },
        "compiled": compiled,
    }
    around = os.environ | ({"ATEN_CPU_CAPABILITY": vector.lower()} if vector in ORDER else {})
    command = [sys.executable, "-c", STEP, json.dumps(given)]
    done = subprocess.run(command, env=around, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
