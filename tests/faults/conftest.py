"""Fault tests share a cache of their own."""

import pytest


@pytest.fixture(autouse=True, scope="package")
def own_cache(tmp_path_factory):
    """Prepare data once for all fault tests, away from the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
