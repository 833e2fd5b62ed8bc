"""The vector kernels, for the tests of those who call them."""

import ctypes

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
    elif (missing := native.load("AMX", machine_capabilities())) is not None:
        pytest.skip(missing)
    yield request.param
    native.unload()


@pytest.fixture
def loaded():
    vector_flags()
    assert native.load("vector", machine_capabilities()) is None
    yield
    native.unload()
