"""What must stand before anything is imported, and a start of runs that takes no time."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

if not any(Path("/dev", name).exists() for name in ("nvidia0", "kfd")):
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


@pytest.fixture(scope="session")
def short_measurement():
    """Runs in this process measure the machine's fastest matmul for 10 ms when they start, not for
    300, which is more than most of them train."""
    from pentameter.machine.ceilings import ceiling
    from pentameter.machine.peaks import measure_matmul

    measure = partial(measure_matmul, seconds=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pentameter.train.compute.ceiling", partial(ceiling, measure=measure))
        yield
