"""The tests share tiny runs, and a cache that is not the user's."""

import sys
from pathlib import Path

from cache_of_a_folder import own_cache

sys.path.insert(0, str(Path(__file__).parent))  # for programs of several tests

__all__ = ["own_cache"]
