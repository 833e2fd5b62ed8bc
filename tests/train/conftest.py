"""The tests of the loop share tiny runs, and a cache that is not the user's."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `tiny_runs`


@pytest.fixture(autouse=True, scope="package")
def own_cache(tmp_path_factory, short_measurement):
    """Prepare data once for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
