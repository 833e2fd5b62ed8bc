"""A compiler is tried in the folder that a run will use, and what it builds is run there."""

import importlib.machinery
import os
import subprocess
import sys

import pytest
import torch

from pentameter.errors import ConfigError
from pentameter.machine import capabilities as machine
from pentameter.machine.capabilities import (
    Capabilities,
    CpuCapabilities,
    GpuCapabilities,
    compiler_error,
    find_compiler,
)
from pentameter.machine.choices import choose_compile

TRIAL = """
import torch
from pentameter.machine.capabilities import find_compiler
found = find_compiler(torch.device("cpu"))
print(found.works, found.reason)
"""


def tried(folder, *before, **environment):
    """Return what the trial says in a new process whose temporary folder is `folder`."""
    kept = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [*before, sys.executable, "-c", TRIAL],
        env=kept | {"TMPDIR": str(folder)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_folder_with_a_blank_is_refused_with_the_way_out(tmp_path):
    folder = tmp_path / "t mp"
    folder.mkdir()
    said = tried(folder)
    assert said.startswith("False")
    assert f"set TORCHINDUCTOR_CACHE_DIR or TMPDIR, now {folder}/torchinductor_" in said


@pytest.mark.slow
def test_a_user_whose_name_has_a_blank_is_told(tmp_path):
    said = tried(tmp_path, LOGNAME="Ann Lee", USER="Ann Lee")
    assert said.startswith("False")
    assert f"{tmp_path}/torchinductor_Ann Lee, to a folder whose path has no blank" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"), [("noexec", "failed to map segment"), ("size=3m", "No space left")]
)
def test_a_disk_that_runs_nothing_or_is_full_is_told(tmp_path, options, said):
    mounted = f'mount -t tmpfs -o {options} tmpfs {tmp_path} && exec "$@"'
    before = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, "sh"]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may mount nothing")
    found = tried(tmp_path, *before)
    assert found.startswith("False")
    assert said in found


WITHOUT_OPENMP = """#!/bin/sh
case " $* " in
  *" -fopenmp "*) echo "clang++: error: unsupported option '-fopenmp'" >&2; exit 1 ;;
esac
exec g++ "$@"
"""
WITHOUT_HEADERS = """#!/bin/sh
[ $1 = --version ] && exec g++ $1
echo 'probe.cpp:1: fatal error: no Python.h' >&2
exit 1
"""


@pytest.mark.parametrize(
    ("name", "script", "expected"),
    [
        (
            "clang++",  # as Apple's
            WITHOUT_OPENMP,
            "unsupported option '-fopenmp' (install OpenMP, on macOS by `brew",
        ),
        ("broken-c++", WITHOUT_HEADERS, "no Python.h (install the Python headers"),
    ],
)
def test_a_compiler_that_lacks_what_it_needs_is_told_and_not_used(tmp_path, name, script, expected):
    """In a process of its own: PyTorch keeps what it finds of the first compiler that it calls."""
    compiler = tmp_path / name
    compiler.write_text(script)
    compiler.chmod(0o755)
    said = tried(tmp_path, CXX=str(compiler))
    assert said.startswith("False")
    assert expected in said


CUDA = torch.device("cuda")
A100 = Capabilities(
    CpuCapabilities("Some CPU", 4, 4, amx_bf16=False, avx512_bf16=False, vector="AVX2"),
    (GpuCapabilities("NVIDIA A100", "sm_80", 2**36),),
    "cuda 12.8",
    mps=False,
)
A_LONG_RUN = 1e30


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A function that has the trial on a GPU end as `computed` does, called with the input."""
    spec = importlib.machinery.ModuleSpec("triton", None)
    monkeypatch.setattr(machine, "find_spec", lambda name: spec)
    monkeypatch.setenv("CC", "gcc")
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda n, device: ones(n))

    def end_as(computed):
        monkeypatch.setattr(torch, "compile", lambda *_, **__: computed)

    return end_as


def test_triton_is_chosen_once_a_function_ran_on_the_gpu(on_a_gpu):
    on_a_gpu(lambda x: x * 2 + 1)
    found = choose_compile("auto", CUDA, total_flops=A_LONG_RUN, capabilities=A100)
    assert found == (True, "triton with gcc")
    on_a_gpu(lambda x: x)
    wrong = find_compiler(CUDA, A100)
    assert (wrong.works, wrong.reason) == (False, "gcc builds what computes wrong numbers")


FAILED = "CalledProcessError: Command '['/usr/bin/gcc', '/tmp/x/cuda_utils.c', '-O3']' returned"
IN_A_PROCESS = f"""SubprocException: An exception occurred in a subprocess:

Name=triton_poi_fused_0
Traceback (most recent call last):
  File "/x/subproc_pool.py", line 424, in do_job
    result = job()
subprocess.{FAILED} non-zero exit status 1.

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FAILED, f"{FAILED} (set TORCHINDUCTOR_CACHE_DIR or TMPDIR"),
        (IN_A_PROCESS, "'-O3']' returned non-zero exit status 1. (set TORCHINDUCTOR_CACHE_DIR"),
        ("AssertionError: libcuda.so cannot found!\nPlease", "find the driver's libcuda.so.1: /sb"),
    ],
)
def test_a_trial_that_fails_on_a_gpu_leaves_the_run_uncompiled(on_a_gpu, error, said):
    def computed(x):
        raise RuntimeError(error)

    on_a_gpu(computed)
    compiles, reason = choose_compile("auto", CUDA, total_flops=A_LONG_RUN, capabilities=A100)
    assert not compiles
    assert said in reason
    assert "\n" not in reason
    with pytest.raises(ConfigError, match=r"^train\.compile=true cannot be: gcc builds nothing"):
        choose_compile(True, CUDA, total_flops=0, capabilities=A100)


def test_a_machine_without_pythons_headers_is_told_before_triton_meets_it(
    on_a_gpu, monkeypatch, tmp_path, capfd
):
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda *_: str(tmp_path))
    on_a_gpu(None)  # it is not called
    compiles, reason = choose_compile("auto", CUDA, total_flops=A_LONG_RUN, capabilities=A100)
    assert not compiles
    assert reason.startswith("gcc builds no launcher for triton: <stdin>:1:10: fatal error: ")
    assert "(install the Python headers: python3-dev" in reason
    with pytest.raises(
        ConfigError, match=r"train\.compile=true cannot be.*headers.*set it to false"
    ):
        choose_compile(True, CUDA, total_flops=0, capabilities=A100)
    assert capfd.readouterr() == ("", "")


def test_the_line_of_an_error_that_says_what_is_wrong():
    assert compiler_error(ValueError("odd\nand more")) == "odd"
    assert compiler_error(ValueError()) == "ValueError"
    assert compiler_error("In file x:\ny.c:1: fatal error: no z.h\n").endswith("no z.h")
