"""One set of processes for all tests: what they import is imported once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="package")
def runs(tmp_path_factory):
    from trials.layout_runs import Runs

    with Runs(tmp_path_factory.mktemp("parity")) as running:
        yield running
