"""What torch and the kernel's files say of other machines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pentameter.cli.options.arguments import device_for_verb
from pentameter.errors import ConfigError
from pentameter.machine import capabilities as machine
from pentameter.machine.capabilities import has_kernels, held_by_others, machine_capabilities
from pentameter.machine.choices import choose_device, choose_precision, emulates
from pentameter.model.gpu.forms import PLAIN_FORMS
from pentameter.report.text.doctor import examine, machine_rows
from pentameter.train.say.start_warnings import compute_warnings

CPU = torch.device("cpu")
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
GPUS = {
    "GTX 980": (5, 2), "P100": (6, 0), "GTX 1080": (6, 1), "V100": (7, 0), "T4": (7, 5),
    "A100": (8, 0), "RTX 4090": (8, 9), "H100": (9, 0), "RTX 5090": (12, 0),
}  # fmt: skip


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """A function that makes torch one for CUDA 13 that shows the GPUs of these names, and returns
    the capabilities of a machine with these files."""

    def show(*names, built_for=CUDA_13, hip=None, files=None):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)

        def properties(index):
            major, minor = GPUS.get(names[index], (0, 0))
            return SimpleNamespace(
                name=names[index], major=major, minor=minor, total_memory=2**34,
                gcnArchName=f"{names[index]}:xnack-",
            )  # fmt: skip

        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        for name, text in (files or {}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return machine_capabilities(tmp_path)

    return show


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_without_kernels_is_left_out_and_said(pretend, name):
    here = pretend(name)
    old = GPUS[name] < (7, 5)
    assert choose_device("auto", here).type == ("cpu" if old else "cuda")
    assert (here.gpu_obstacle is None) is not old
    if old:
        architecture = "sm_{}{}".format(*GPUS[name])
        said = rf"{name} \({architecture}\) is left out, .* for sm_75, sm_80.*CUDA 12\.6"
        with pytest.raises(ConfigError, match=rf"train\.device=cuda is not on.*{said}.*cpu"):
            choose_device("cuda", here)


def test_gpus_keep_their_numbers(pretend):
    here = pretend("RTX 4090", "GTX 1080", "T4")
    assert [gpu.name for gpu in here.gpus] == ["RTX 4090"]
    assert choose_device("auto", here).type == "cuda"
    with pytest.raises(ConfigError, match=r"cuda:1 is not here: .* 1: GTX 1080 .*VISIBLE"):
        here.gpu(torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("architecture", "built_for", "expected"),
    [
        ("sm_86", ["sm_80"], True),
        ("sm_80", ["sm_86"], False),
        ("sm_90", ["sm_80"], False),
        ("sm_90", ["sm_80", "compute_80"], True),  # PTX is compiled for what comes later
        ("sm_90", ["sm_90a"], True),
        ("sm_91", ["sm_90a"], False),
        ("sm_103", ["sm_100f"], True),
        ("sm_120", ["sm_100"], False),
        ("sm_60", [], True),  # a build that does not say
        ("gfx90a", ["gfx90a", "gfx942"], True),
        ("gfx803", ["gfx90a", "gfx942"], False),
        ("gfx1101", ["gfx90a", "gfx11-generic"], True),
    ],
)
def test_who_has_kernels(architecture, built_for, expected):
    assert has_kernels(architecture, built_for) is expected


def test_amds_gpus_go_by_their_chips(pretend):
    assert pretend("gfx942", built_for=["gfx942"], hip="6.4").gpus[0].architecture == "gfx942"
    assert "gfx803 (gfx803) is left out" in str(
        pretend("gfx803", built_for=["gfx942"], hip="6.4").gpu_obstacle
    )


DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Aug 19 01:15:15 UTC 2023\nGCC …"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root@x)\n"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"dev/nvidia0": "", "proc/driver/nvidia/version": DRIVER.format("535.104.05")},
            "torch, built for cuda 13.0, cannot use the NVIDIA GPU of this machine: it needs "
            "driver 580 or newer, this one is 535.104.05. Update",
        ),
        (
            {"dev/nvidia3": "", "proc/driver/nvidia/version": OPEN.format("580.65.06")},
            "whose driver is 580.65.06: does nvidia-smi show it?",
        ),
        ({"usr/lib/wsl/lib/nvidia-smi": ""}, "needs driver 580 or newer, is this one older?"),
        ({"dev/nvidiactl": ""}, None),
        ({"dev/kfd": ""}, None),
    ],
)
def test_a_driver_that_torch_cannot_use_is_said(pretend, monkeypatch, files, said):
    here = pretend(files=files)
    if said is None:
        assert here.gpu_obstacle is None
        return
    assert said in here.gpu_obstacle
    with pytest.raises(ConfigError, match=r"train\.device=cuda is not on .* torch, built"):
        choose_device("cuda", here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert machine._driver_obstacle("cuda 13.0", machine.Path("/")) is None


def test_what_is_left_out_is_said_where_a_model_runs(pretend, monkeypatch, capsys):
    here = pretend("P100")
    monkeypatch.setattr(machine, "machine_capabilities", lambda: here)
    assert device_for_verb("auto") == CPU
    assert capsys.readouterr().err.startswith("pentameter: P100 (sm_60) is left out, as this torch")
    assert device_for_verb("cpu") == CPU
    assert capsys.readouterr().err == ""
    computed = SimpleNamespace(gpu_obstacle=here.gpu_obstacle, forms=PLAIN_FORMS, measured=None)
    world = SimpleNamespace(broadcast=lambda value: value)
    assert compute_warnings(None, computed, world) == [here.gpu_obstacle]


def test_doctor_says_it(pretend):
    here = pretend("P100")
    gpus = {"gpus": [], "gpu_runtime": here.gpu_runtime, "gpu_obstacle": here.gpu_obstacle}
    facts = examine()
    facts["devices"] |= gpus
    assert ("gpu", "left out", here.gpu_obstacle) in list(machine_rows(facts))


PI_5 = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0b
CPU revision\t: 1

processor\t: 1
"""
GRAVITON_3 = PI_5.replace("0xd0b", "0xd40").replace("asimddp", "asimddp svebf16 i8mm bf16 dgh")
GRACE = GRAVITON_3.replace("0xd40", "0xd4f")
RYZEN = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD Ryzen 9 7950X 16-Core Processor
flags\t\t: fpu avx2 avx512f avx512_bf16

processor\t: 1
"""
CELERON = "processor : 0\nmodel name : Intel(R) Celeron(R) N4020\nflags : fpu sse4_2\n"
BOARD = {"proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0"}
NEITHER = "this CPU has neither AMX, AVX-512 BF16 nor ARM's, so bf16 would be slower"


@pytest.mark.parametrize(
    ("cpuinfo", "files", "name", "precision", "why"),
    [
        (PI_5, BOARD, "Raspberry Pi 5 Model B Rev 1.0", "fp32", NEITHER),
        (PI_5, {}, "ARM Cortex-A76", "fp32", NEITHER),  # in a container, which hides the board
        (GRAVITON_3, {}, "ARM Neoverse V1", "fp32", "(ARM's) are faster is not known"),
        (GRACE, {}, "ARM Neoverse V2", "fp32", "(ARM's) are faster is not known"),
        (GRACE.replace("0xd4f", "0xfff"), {}, "ARM CPU part 0xfff of implementer 0x41", "fp32", ""),
        (RYZEN, {}, "AMD Ryzen 9 7950X 16-Core Processor", "bf16", "AVX-512 BF16"),
        (CELERON, {}, "Intel(R) Celeron(R) N4020", "fp32", NEITHER),
    ],
)
def test_processors_by_what_their_kernels_say(pretend, cpuinfo, files, name, precision, why):
    here = pretend(files={"proc/cpuinfo": cpuinfo, **files})
    assert here.cpu.name == name
    chosen, reason = choose_precision("auto", CPU, here)
    assert chosen == precision
    assert why in reason
    assert emulates("bf16", CPU, here) is (why == NEITHER)


def test_arms_bf16_can_be_asked_for_and_is_not_called_slow(pretend):
    here = pretend(files={"proc/cpuinfo": GRACE})
    assert choose_precision("bf16", CPU, here) == ("bf16", "asked for")


@pytest.mark.parametrize(
    ("free", "own", "held"),
    [(80.0, 0.0, 0.0), (79.5, 0.0, 0.0), (40.0, 39.5, 0.0), (70.0, 0.0, 9.5), (30.0, 20.0, 29.5)],
)
def test_what_other_processes_hold_of_a_gpu(monkeypatch, free, own, held):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 1e9, 80e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own * 1e9)
    assert held_by_others(torch.device("cuda")) == pytest.approx(held * 1e9)
    assert held_by_others(torch.device("cpu")) == 0
