"""The C++ kernels, for the tests of those who call them."""

import ctypes
import hashlib
from pathlib import Path

import pytest

from pentameter.fused_cpu import native
from pentameter.machine.capabilities import machine_capabilities


def vector_flags():
    """The compiler's flags for this CPU; skips where there are none."""
    flags = native.machine_flags("vector", machine_capabilities().cpu)
    if flags is None:
        pytest.skip("the CPU has neither AVX2 nor AVX-512")
    return flags


def load_width(n_bytes):
    """Load vector kernels with registers of so many bytes; of wider ones than the CPU's the
    compiler makes several."""
    flags = (*vector_flags(), f"-DVECTOR_BYTES={n_bytes}")
    native._loaded["vector"] = ctypes.CDLL(str(native.build("vector", flags)))


EMULATED = Path(__file__).with_name("emulated")
"""The folder of the header with which the kernels on tiles are compiled for any processor."""


def load_tiles():
    """Load the kernels on matrix tiles: this CPU's own, or where it has none emulated ones."""
    if native.load("AMX", machine_capabilities()) is not None:
        load_emulated()


def emulated_flags():
    """The compiler's flags for kernels on instructions that are emulated: none of a processor, so
    that the same code runs on all. What is compiled in 3 s so takes 18 with -O3."""
    header = hashlib.sha256((EMULATED / "immintrin.h").read_bytes()).hexdigest()[:16]
    return "-O1", "-DVECTOR_BYTES=64", f"-I{EMULATED}", f"-DHEADER=0x{header}u"


def load_emulated():
    """Load the kernels on matrix tiles, which are emulated, whatever the CPU has."""
    native._loaded["AMX"] = ctypes.CDLL(str(native.build("AMX", emulated_flags())))


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
def vector_cpu():
    """Skips where the CPU has no instructions for the vector kernels."""
    vector_flags()


@pytest.fixture
def loaded(vector_cpu):
    assert native.load("vector", machine_capabilities()) is None
    yield
    native.unload()
