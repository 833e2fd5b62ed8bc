"""The C++ kernels, for the tests of those who call them, on any processor that has a compiler: what
it has no instructions for is emulated, or compiled for those that it has."""

import ctypes
import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pentameter.fused_cpu import native
from pentameter.machine.capabilities import compiler_command, machine_capabilities

EMULATED = Path(__file__).with_name("emulated")
"""The folder of the header with which kernels for other processors' instructions are compiled."""
AVX512_BF16 = ("-D__AVX512F__", "-D__AVX512BF16__")
"""What tells the vector kernels' sources of instructions that are emulated."""


def skip_without_compiler():
    if compiler_command() is None or sys.platform != "linux":
        pytest.skip("there is no C++ compiler, or none that the kernels are for")


def build(name, flags):
    """Build and load a library; skips where nothing can be built."""
    skip_without_compiler()
    native._loaded[name] = ctypes.CDLL(str(native.build(name, flags)))


def emulated_flags():
    """The compiler's flags for kernels on instructions that are emulated: none of a processor, so
    that the same code runs on all. What is compiled in 3 s so takes 18 with -O3."""
    header = hashlib.sha256((EMULATED / "immintrin.h").read_bytes()).hexdigest()[:16]
    return "-O1", "-DVECTOR_BYTES=64", f"-I{EMULATED}", f"-DHEADER=0x{header}u"


def _flags_anywhere(name, cpu):
    """The compiler's flags for a library on a CPU that need not be this one: none where that has no
    vector instructions, its own where this CPU has them too, else those that emulate them."""
    flags = native.machine_flags(name, cpu)
    own = native.machine_flags(name, machine_capabilities().cpu)
    if name == "vector" and flags is None:
        return ()
    if own is not None and set(flags or ()) <= set(own):
        return flags
    return emulated_flags() if name == "AMX" else (*emulated_flags(), *AVX512_BF16)


def load_width(n_bytes):
    """Load vector kernels with registers of so many bytes; of wider ones than the CPU's the
    compiler makes several. The widest multiply pairs of bf16 numbers."""
    cpu = machine_capabilities().cpu
    if n_bytes == 64:
        build("vector", _flags_anywhere("vector", replace(cpu, vector="AVX512", avx512_bf16=True)))
    else:
        build("vector", (*(native.machine_flags("vector", cpu) or ()), f"-DVECTOR_BYTES={n_bytes}"))


def load_tiles():
    """Load the kernels on matrix tiles: this CPU's own, or where it has none emulated ones."""
    if native.load("AMX", machine_capabilities()) is not None:
        load_emulated()


def load_emulated():
    """Load the kernels on matrix tiles, which are emulated, whatever the CPU has."""
    build("AMX", emulated_flags())


@pytest.fixture
def flags_anywhere():
    """Flags for a library on another CPU, as a function of both; skips without a compiler."""
    skip_without_compiler()
    return _flags_anywhere


@pytest.fixture(scope="module")
def tiles():
    load_tiles()
    yield
    native.unload()


@pytest.fixture
def emulated_tiles():
    load_emulated()
    yield
    native.unload()


@pytest.fixture(scope="module", params=(64, 32, 16))
def width(request):
    load_width(request.param)
    yield request.param
    native.unload()


@pytest.fixture(scope="module", params=(64, 32, 16, "AMX"))
def kernels(request):
    """Vector kernels as in `width`, or those on matrix tiles."""
    if request.param != "AMX":
        load_width(request.param)
    else:
        load_tiles()
    yield request.param
    native.unload()


@pytest.fixture
def vector_cpu(monkeypatch):
    """`native` builds vector kernels on any CPU, plain ones where it has no vector instructions."""
    own = native.machine_flags
    if own("vector", machine_capabilities().cpu) is None:
        monkeypatch.setattr(native, "machine_flags", lambda name, cpu: own(name, cpu) or ())
        monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")


@pytest.fixture
def loaded(vector_cpu):
    skip_without_compiler()
    assert native.load("vector", machine_capabilities()) is None
    yield
    native.unload()


@pytest.fixture
def amx_cpu(monkeypatch):
    """This machine as one with AMX, whose tiles are emulated, and AVX-512; nothing stays loaded."""
    here = machine_capabilities()
    cpu = replace(here.cpu, vector="AVX512", avx512_bf16=True, amx_bf16=True)
    flags = {name: _flags_anywhere(name, cpu) for name in native.FILES} | {"AMX": emulated_flags()}
    monkeypatch.setattr(native, "machine_flags", lambda name, cpu: flags[name])
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    skip_without_compiler()
    yield replace(here, cpu=cpu)
    native.unload()
