"""Building the native kernels: never a reason for a run to fail."""

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pentameter.fused_cpu import native
from pentameter.machine.capabilities import machine_capabilities

CPUS = {
    "AMX": {"amx_bf16": True, "avx512_bf16": True, "vector": "AVX512"},
    "AVX-512 BF16": {"amx_bf16": False, "avx512_bf16": True, "vector": "AVX512"},
    "AVX2": {"amx_bf16": False, "avx512_bf16": False, "vector": "AVX2"},
    "old": {"amx_bf16": False, "avx512_bf16": False, "vector": "DEFAULT"},
}


X86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the compiler makes code for another processor"
)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Capabilities of a machine said to have a CPU, with an empty cache; nothing stays loaded."""
    monkeypatch.setattr("pentameter.fused_cpu.native.sys.platform", "linux")
    monkeypatch.setattr("pentameter.fused_cpu.native.platform.machine", lambda: "x86_64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    capabilities = machine_capabilities()
    yield lambda cpu: replace(capabilities, cpu=replace(capabilities.cpu, **CPUS[cpu]))
    native.unload()


@pytest.mark.parametrize(
    ("name", "cpu", "reason"),
    [
        ("AMX", "AVX-512 BF16", "the CPU has no AMX"),
        ("AMX", "AVX2", "the CPU has no AMX"),
        ("vector", "old", "the CPU has neither AVX2 nor AVX-512"),
    ],
)
def test_a_cpu_without_the_instructions_builds_nothing(machine, tmp_path, name, cpu, reason):
    assert native.load(name, machine(cpu)) == reason
    assert not (tmp_path / "cache").exists()


def test_another_system_builds_nothing(machine, monkeypatch):
    monkeypatch.setattr("pentameter.fused_cpu.native.platform.machine", lambda: "arm64")
    assert native.load("AMX", machine("AMX")) == "the AMX kernels are for Linux on x86-64"
    assert native.load("vector", machine("AVX2")) == "the vector kernels are for Linux on x86-64"


@pytest.mark.parametrize("name", native.FILES)
def test_a_missing_compiler_is_a_reason(machine, monkeypatch, name):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    reason = str(native.load(name, machine("AMX")))
    assert f"the {name} kernels cannot be built: no C++ compiler found" in reason


def test_an_unwritable_cache_is_a_reason(machine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "the vector kernels cannot be built" in str(native.load("vector", machine("AVX2")))


@X86
@pytest.mark.parametrize(
    ("version", "cpu", "refused"),
    [
        (9, "AVX2", "march=x86-64-v|march=sapphire|mavx512bf16|mamx"),
        (10, "AVX2", "march=x86-64-v|march=sapphire|mamx"),
        (9, "AVX-512 BF16", "march=x86-64-v|march=sapphire|mavx512bf16|mamx"),
        (10, "AVX-512 BF16", "march=x86-64-v|march=sapphire|mamx"),
    ],
)
def test_older_compilers_build_the_vector_kernels(
    machine, monkeypatch, tmp_path, version, cpu, refused
):
    """GCC 9 and 10 do not know what came after them."""
    compiler = tmp_path / f"g++-{version}"
    compiler.write_text(
        f"#!/bin/sh\nfor each; do if echo \"$each\" | grep -qE -e '-({refused})'; then "
        'echo "error: bad value or option $each" >&2; exit 1; fi; done\n'
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: path)  # this CPU may not run it
    assert native.load("vector", machine(cpu)) is None
    assert "the AMX kernels cannot be built" in str(native.load("AMX", machine("AMX")))


def test_a_slow_compiler_is_waited_for(machine, monkeypatch, tmp_path, capsys):
    """What a step computes with does not depend on how busy the machine is."""
    compiler = tmp_path / "g++-slow"
    compiler.write_text('#!/bin/sh\nsleep 0.3\nfor last; do :; done\n: > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(native, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: path)
    assert native.load("vector", machine("AVX2")) is None
    said = (
        f"pentameter: the vector kernels are still being compiled by {compiler}, which happens once"
    )
    assert capsys.readouterr().err == f"{said}\n"
    assert native.load("vector", machine("AVX2")) is None
    assert not capsys.readouterr().err


@X86
@pytest.mark.parametrize("name", native.FILES)
def test_a_library_is_built_once(machine, monkeypatch, tmp_path, name):
    capabilities = machine_capabilities()
    if native.machine_flags(name, capabilities.cpu) is None:  # this CPU can build it, not run it
        capabilities = machine("AMX")
        library = SimpleNamespace(pentameter_amx_works=lambda: 1)
        monkeypatch.setattr(native.ctypes, "CDLL", lambda path: library)
    assert native.load(name, capabilities, "-O2") is None
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert native.load(name, capabilities, "-O2") is None
    (folder,) = (tmp_path / "cache/pentameter/native").iterdir()
    assert folder.name.split("-")[0] == name.lower()
    assert [each.name for each in folder.iterdir()] == [f"{name.lower()}.so"]


@X86
def test_processes_that_need_a_library_at_once_build_it_once(tmp_path, monkeypatch):
    calls, compiler = tmp_path / "calls", tmp_path / "g++-counted"
    compiler.write_text(f'#!/bin/sh\necho call >> {calls}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code = (
        "from pentameter.fused_cpu import native; "
        "print(native.build('rows', ('-O0', *native._AVX2)))"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {rank.communicate()[0].strip() for rank in ranks}
    assert len(said) == 1
    assert Path(*said).is_file()
    n_sources = len(native.FILES["rows"])
    assert calls.read_text().split() == ["call"] * (n_sources + 1)  # and the library


@X86
@pytest.mark.parametrize(
    ("name", "cpu"),
    [
        ("AMX", "AMX"),
        *(
            (name, cpu)
            for name in native.FILES
            if name != "AMX"
            for cpu in ("AVX2", "AVX-512 BF16")
        ),
    ],
)
def test_every_cpus_library_can_be_built_anywhere(machine, name, cpu):
    """What this CPU cannot run it can compile, so that no edit breaks it unseen."""
    assert native.build(name, native.machine_flags(name, machine(cpu).cpu)).is_file()


def test_a_library_serves_its_dtypes(monkeypatch):
    monkeypatch.setattr(native, "_loaded", {"vector": object()})
    assert native.serves("vector", torch.float32, torch.float32)
    assert native.serves("vector", torch.float32, torch.bfloat16)
    assert not native.serves("vector", torch.float64, torch.float64)
    assert not native.serves("vector", torch.float32, torch.float16)
    assert not native.serves("AMX", torch.float32, torch.bfloat16)
