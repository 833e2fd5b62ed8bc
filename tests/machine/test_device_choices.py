"""Choices are made from faked capabilities, so that every machine is tested on any machine."""

import dataclasses
import json
import subprocess

import pytest
import torch

from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError
from pentameter.estimating.seconds.cluster import Cluster, known_devices
from pentameter.estimating.seconds.estimate import best_precision
from pentameter.machine import choices
from pentameter.machine.capabilities import (
    Capabilities,
    Compiler,
    CpuCapabilities,
    GpuCapabilities,
    find_compiler,
    gpu_name,
    machine_capabilities,
)
from pentameter.machine.choices import (
    choose_compile,
    choose_device,
    choose_precision,
)
from pentameter.machine.environment import device_name, environment, git_state
from pentameter.machine.peaks import peak_flops

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
PLAIN_CPU = CpuCapabilities("Some CPU", 4, 4, amx_bf16=False, avx512_bf16=False, vector="AVX2")


def machine(*, amx=False, avx512=False, gpu=None, runtime=None, mps=False):
    cpu = dataclasses.replace(PLAIN_CPU, amx_bf16=amx, avx512_bf16=avx512)
    return Capabilities(cpu, () if gpu is None else (gpu,), runtime, mps)


def nvidia(name, major, minor):
    gpu = GpuCapabilities(name, f"sm_{major}{minor}", 80 * 2**30)
    return machine(gpu=gpu, runtime="cuda 12.8")


def amd(architecture):
    return machine(gpu=GpuCapabilities("AMD", architecture, 64 * 2**30), runtime="rocm 6.4")


A100 = nvidia("NVIDIA A100-SXM4-80GB", 8, 0)
V100 = nvidia("Tesla V100-SXM2-16GB", 7, 0)
P100 = nvidia("Tesla P100-PCIE-16GB", 6, 0)


@pytest.mark.parametrize(
    ("here", "expected"),
    [(machine(), CPU), (machine(mps=True), MPS), (A100, CUDA), (amd("gfx942"), CUDA)],
)
def test_auto_device(here, expected):
    assert choose_device("auto", here) == expected
    assert choose_device("cpu", here) == CPU


@pytest.mark.parametrize("name", ["cuda", "mps", "tpu"])
def test_a_device_that_is_not_here(name):
    with pytest.raises(ConfigError, match=rf"train\.device={name}.*present: cpu"):
        choose_device(name, machine())


@pytest.mark.parametrize(
    ("here", "device", "expected", "why"),
    [
        (machine(), CPU, "fp32", "neither"),
        (machine(avx512=True), CPU, "bf16", "AVX-512"),
        (machine(amx=True, avx512=True), CPU, "bf16", "AMX"),
        (A100, CUDA, "bf16", "sm_80"),
        (nvidia("NVIDIA GeForce RTX 5090", 12, 0), CUDA, "bf16", "sm_120"),
        (V100, CUDA, "fp16", "no bf16"),
        (nvidia("Tesla T4", 7, 5), CUDA, "fp16", "sm_75"),
        (P100, CUDA, "fp32", "no tensor cores"),
        (amd("gfx942"), CUDA, "bf16", "gfx942"),
        (amd("gfx90a"), CUDA, "bf16", "gfx90a"),
        (amd("gfx906"), CUDA, "fp16", "no bf16"),
        (machine(mps=True), MPS, "fp32", "MPS"),
    ],
)
def test_auto_precision(here, device, expected, why):
    precision, reason = choose_precision("auto", device, here)
    assert precision == expected
    assert why in reason
    # what auto takes can also be asked for
    assert choose_precision(expected, device, here)[0] == expected


@pytest.mark.parametrize(
    ("planned", "here"),
    [
        ("a100-80gb", A100),
        ("v100", V100),
        ("t4", nvidia("Tesla T4", 7, 5)),
        ("gtx-1080-ti", nvidia("NVIDIA GeForce GTX 1080 Ti", 6, 1)),
        ("mi100", amd("gfx908")),  # fp16 is twice as fast as bf16
        ("mi250x", amd("gfx90a")),
        ("mi300x", amd("gfx942")),
    ],
)
def test_a_plan_takes_the_precision_of_a_run(planned, here):
    device = known_devices()[planned]
    cluster = Cluster(device_key=planned, device=device, node_size=1, n_nodes=1)
    best = best_precision(load_config("gpt2-124m", {"train.precision": "auto"}), cluster)
    assert best == choose_precision("auto", CUDA, here)[0]


@pytest.mark.parametrize(
    ("here", "device", "setting", "possible"),
    [
        (machine(), CPU, "tf32", "fp64, fp32, bf16, fp16"),
        (V100, CUDA, "bf16", "fp64, fp32, fp16"),
        (V100, CUDA, "tf32", "fp64, fp32, fp16"),
        (P100, CUDA, "bf16", "fp64, fp32, fp16"),
        (amd("gfx90a"), CUDA, "tf32", "fp64, fp32, bf16, fp16"),
        (amd("gfx950"), CUDA, "tf32", "fp64, fp32, bf16, fp16"),
        (machine(mps=True), MPS, "fp64", "fp32, bf16, fp16"),
    ],
)
def test_an_impossible_precision(here, device, setting, possible):
    message = rf"train\.precision={setting} is not possible on {device.type}.*: {possible}, auto"
    with pytest.raises(ConfigError, match=message):
        choose_precision(setting, device, here)


def test_slow_bf16_can_be_asked_for_and_is_called_slow():
    assert choose_precision("bf16", CPU, machine()) == (
        "bf16",
        "asked for; this CPU emulates it, slower than fp32",
    )
    assert choose_precision("tf32", CUDA, A100) == ("tf32", "asked for")


def test_fp16_without_tensor_cores_can_be_asked_for_and_says_what_for():
    precision, reason = choose_precision("fp16", CUDA, P100)
    assert precision == "fp16"
    assert reason == (
        "asked for; Tesla P100-PCIE-16GB, sm_60 has no tensor cores: it halves activations, and "
        "need not be faster than fp32"
    )
    assert choose_precision("fp16", CUDA, V100) == ("fp16", "asked for")


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        (P100, "triton needs compute capability 7.0, and Tesla P100-PCIE-16GB has 6.0"),
        (
            nvidia("NVIDIA GeForce GTX 1080 Ti", 6, 1),
            "triton needs compute capability 7.0, and NVIDIA GeForce GTX 1080 Ti has 6.1",
        ),
    ],
)
def test_a_gpu_that_triton_does_not_know_is_not_compiled_for(here, reason):
    assert choose_compile("auto", CUDA, total_flops=1e30, capabilities=here) == (False, reason)
    with pytest.raises(ConfigError, match=rf"train\.compile=true cannot be: {reason}\. Or set it"):
        choose_compile(True, CUDA, total_flops=0, capabilities=here)


@pytest.mark.parametrize("here", [V100, A100, nvidia("GPU", 12, 0), amd("gfx90a")])
def test_other_gpus_are_not_refused_for_their_age(here):
    assert "compute capability" not in find_compiler(CUDA, here).reason


def test_compile_can_be_switched_off():
    assert choose_compile(False, CPU, total_flops=1e30, capabilities=machine()) == (
        False,
        "switched off",
    )


def test_a_short_run_is_not_compiled():
    # 100 steps of the character GPT on four fp32 cores take minutes, on an A100 a second
    flops = 100 * 1.16e12
    assert not choose_compile("auto", CUDA, total_flops=flops, capabilities=A100)[0]
    compiled, reason = choose_compile("auto", CPU, total_flops=1e12, capabilities=machine())
    assert not compiled
    assert "too short" in reason


@pytest.mark.parametrize(
    ("seconds", "found", "compiled", "said"),
    [
        (15, "kernels in C++", False, "(about 15 s) to earn back 8 s of compiling"),
        (17, "kernels in C++", True, "it builds"),
        (17, None, False, "(about 17 s) to earn back 40 s of compiling"),  # the C++ did not build
        (81, None, True, "it builds"),
    ],
)
def test_a_run_is_weighed_against_what_is_compiled_for_it(seconds, found, compiled, said):
    here = machine()
    chosen = choose_compile(
        "auto",
        CPU,
        total_flops=seconds * here.cpu.n_cores * choices._EAGER_CORE_FP32,
        precision="fp32",
        capabilities=here,
        makes="kernels in C++",
        find=lambda *_: Compiler("g++", True, "it builds", found),
    )
    assert chosen[0] == compiled
    assert said in chosen[1]


def test_compile_needs_a_compiler_that_works(monkeypatch, tmp_path):
    broken = Compiler("g++", works=False, reason="it builds nothing that runs")
    with monkeypatch.context() as patch:
        patch.setattr(choices, "find_compiler", lambda *_: broken)
        found = choose_compile("auto", CPU, total_flops=1e18, capabilities=machine())
        assert found == (False, broken.reason)
        with pytest.raises(ConfigError, match=rf"train\.compile=true cannot be: {broken.reason}"):
            choose_compile(True, CPU, total_flops=0, capabilities=machine())
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    assert find_compiler(CPU).reason.startswith("no C++ compiler found")


def test_a_long_run_is_compiled_where_it_can_be():
    compiler = find_compiler(CPU)
    compiled, reason = choose_compile("auto", CPU, total_flops=1e18, capabilities=machine())
    assert (compiled, reason) == (compiler.works, compiler.reason)


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", 80),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI250X / MI250", "bf16", 191.5),
        ("Intel(R) Xeon(R) Processor", "bf16", None),
    ],
)
def test_published_peaks(name, precision, teraflops):
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert peak_flops(name, precision) == expected


def test_this_machine_is_described_as_json():
    capabilities = machine_capabilities()
    assert capabilities.cpu.n_cores >= 1
    assert device_name(CPU, capabilities) == capabilities.cpu.name
    facts = json.loads(json.dumps(environment(CPU, capabilities)))
    assert facts["device"] == "cpu"
    assert facts["versions"]["torch"] == str(torch.__version__)
    assert facts["devices"]["cpu"]["cores"] == capabilities.cpu.n_cores


def test_git_state(tmp_path):
    assert git_state(tmp_path / "nowhere") is None

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, "-C", tmp_path, *arguments], check=True)

    try:
        git("init", "-q")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("git is not installed")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path)["dirty"] is True


def test_a_name_that_says_nothing_comes_with_the_chip():
    assert gpu_name("AMD Radeon Graphics", "gfx90a") == "AMD Radeon Graphics (gfx90a)"
    assert gpu_name("Tesla T4", "sm_75") == "Tesla T4"
