"""What PyTorch's compiler compiles nothing of does not import it: a second, on some hosts four."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pentameter.fused_cpu import native
from pentameter.machine.capabilities import compiler_command, machine_capabilities

KIT = Path(__file__).parents[1] / "kit"
TRAINED = """
import sys
sys.path.insert(0, {kit!r})
from tiny_runs import fit
from pentameter.cli.main import main

train = {{"steps": 2, "eval_interval": 1, "compile": {compiled}}}
model = {{"n_heads": 2, "d_model": 64, "context_length": 32}}
fit({run!r}, sections={{"train": train, "model": model}})
"""
USED = """
assert main(["sample", {run!r}, "--max-new-tokens", "4"]) == 0
assert main(["eval", {run!r}]) == 0
import pentameter.serve.server, pentameter.serve.worker
"""
AT_THE_END = """
print("compiler:", sorted({"torch._dynamo", "torch._inductor"} & sys.modules.keys()))
"""


def loaded(code: str) -> str:
    """What of the compiler was loaded after `code` ran in a process of its own."""
    command = [sys.executable, "-c", code + AT_THE_END]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_an_eager_run_and_what_uses_it_load_no_compiler(tmp_path):
    code = (TRAINED + USED).format(kit=str(KIT), run=str(tmp_path / "run"), compiled=False)
    assert loaded(code) == "compiler: []"


def test_a_run_by_kernels_in_cpp_loads_no_compiler(tmp_path):
    if compiler_command() is None or sys.platform != "linux":
        pytest.skip("there is no C++ compiler, or none that the kernels are for")
    if native.machine_flags("vector", machine_capabilities().cpu) is None:
        pytest.skip("this processor has no instructions that the kernels are for")
    code = TRAINED.format(kit=str(KIT), run=str(tmp_path / "run"), compiled=True)
    assert loaded(code) == "compiler: []"
