"""Fault tests share a cache that is not the user's."""

from cache_of_a_folder import own_cache

__all__ = ["own_cache"]
