"""Building the AMX kernels: never a reason for a run to fail."""

from dataclasses import replace

import pytest

from pentameter.fused_cpu import amx
from pentameter.machine.capabilities import machine_capabilities


@pytest.fixture
def with_amx(monkeypatch, tmp_path):
    """A machine said to have AMX, with an empty cache; nothing stays loaded."""
    monkeypatch.setattr("pentameter.fused_cpu.amx.sys.platform", "linux")
    monkeypatch.setattr("pentameter.fused_cpu.amx.platform.machine", lambda: "x86_64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    capabilities = machine_capabilities()
    yield replace(capabilities, cpu=replace(capabilities.cpu, amx_bf16=True))
    amx.unload()


def test_a_cpu_without_amx_builds_nothing(with_amx, tmp_path):
    without = replace(with_amx, cpu=replace(with_amx.cpu, amx_bf16=False))
    assert amx.load(without) == "the CPU has no AMX"
    assert not (tmp_path / "cache").exists()


def test_another_system_builds_nothing(with_amx, monkeypatch):
    monkeypatch.setattr("pentameter.fused_cpu.amx.platform.machine", lambda: "arm64")
    assert amx.load(with_amx) == "the AMX kernels are for Linux on x86-64"


def test_a_missing_compiler_is_a_reason(with_amx, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert "cannot be built: no C++ compiler found" in str(amx.load(with_amx))


def test_an_unwritable_cache_is_a_reason(with_amx, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "the AMX kernels cannot be built" in str(amx.load(with_amx))


@pytest.mark.skipif(not machine_capabilities().cpu.amx_bf16, reason="the CPU has no AMX")
def test_the_library_is_built_once(with_amx, monkeypatch, tmp_path):
    assert amx.load(with_amx) is None
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert amx.load(with_amx) is None
    (library,) = (tmp_path / "cache/pentameter/native").iterdir()
    assert library.suffix == ".so"
