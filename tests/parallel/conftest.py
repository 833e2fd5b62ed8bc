from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the tests that share `measured`


@pytest.fixture(scope="package")
def processes():
    """Started once for all tests that measure what processes send and hold."""
    from measured import Processes

    running = Processes()
    yield running
    running.close()
