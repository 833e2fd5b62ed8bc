"""One set of worker processes for all tests: what they import is imported once."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from pentameter.verify.workers import Workers


@pytest.fixture(scope="session")
def workers():
    here = str(Path(__file__).parent)
    sys.path.insert(0, here)  # workers have the path of who starts them, to find planted_faults
    try:
        with Workers() as running:
            yield running
    finally:
        sys.path.remove(here)


@pytest.fixture
def standing_workers(workers):
    """What stands in for `Workers` and starts none: its block gets the session's, and leaves them
    running."""
    return partial(nullcontext, workers)
