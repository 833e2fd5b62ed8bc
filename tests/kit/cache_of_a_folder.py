"""A cache that is not the user's, for a folder of tests, for a file of them, or for each."""

import pytest


def _own_cache(tmp_path_factory, short_measurement):
    """Prepare data once for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


own_cache = pytest.fixture(autouse=True, scope="package", name="own_cache")(_own_cache)
cache_of_a_file = pytest.fixture(autouse=True, scope="module", name="own_cache")(_own_cache)


@pytest.fixture(autouse=True, name="own_cache")
def cache_of_a_test(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
