"""A cache that is not the user's, for a folder of tests."""

import pytest


@pytest.fixture(autouse=True, scope="package")
def own_cache(tmp_path_factory, short_measurement):
    """Prepare data once for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
