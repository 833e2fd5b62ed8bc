"""What must stand before anything is imported, and a start of runs that takes no time."""

import ctypes
import multiprocessing
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from pentameter.machine.cores_and_memory import has_gpu_file

sys.path.insert(0, str(Path(__file__).with_name("kit")))  # what tests of several folders use

if not has_gpu_file():
    # Triton decides when it is imported whether its kernels run as numpy or are compiled.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Where the environment forbids bytecode files, as images of containers do, each of the hundreds of
# processes that tests start would compile the package from its source.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A suite that nohup, or a shell's `&`, has started ignores these, and so would every command that
# tests send them to.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Tests fork their processes from one server, which imports torch once for all of them. It has
# computed nothing yet, so no thread pool is lost in the fork.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    [
        "pentameter.train.loop",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
    ]
)

LONG = ("verify", "parity", "checkpoint", "faults", "fused_cpu", "processes")
"""Folders with files of tests that take longest."""


MORE = frozenset(Path(__file__).with_name("more.txt").read_text(encoding="utf-8").splitlines())
"""Tests of the tier `more`, which CI runs beside `make test`: path::name, without parameters."""


def pytest_configure() -> None:
    """Fill what memory is handed out without values."""
    from unset_memory import fill_unset_memory  # it imports torch: Triton's form is chosen by now

    fill_unset_memory()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the tier `more`, and put the longest folders first: of two workers neither
    shall begin a long file while the other one ends."""
    for item in items:
        if item.nodeid.partition("[")[0] in MORE:
            item.add_marker(pytest.mark.more)
    folders = {Path(__file__).with_name(name) for name in LONG}
    items.sort(key=lambda item: folders.isdisjoint(item.path.parents))


@pytest.fixture(scope="session")
def short_measurement():
    """Runs in this process measure the machine's fastest matmul for 10 ms when they start, not for
    300, which is more than most of them train."""
    from pentameter.machine.fastest_matmul import ceiling
    from pentameter.machine.peaks import measure_matmul

    measure = partial(measure_matmul, seconds=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pentameter.train.compute.ceiling", partial(ceiling, measure=measure))
        yield


@pytest.fixture
def no_other_reads():
    """A file that its owner may not read this thread cannot read either, where it is root's too."""
    if os.geteuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("root may read every file")
    overriding = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    system, version_3 = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522)
    capabilities = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable; twice 32 bits
    assert system.capget(version_3, capabilities) == 0
    effective = capabilities[0]
    capabilities[0] = effective & ~overriding
    assert system.capset(version_3, capabilities) == 0
    yield
    capabilities[0] = effective
    assert system.capset(version_3, capabilities) == 0
