"""What this machine can do, measured."""

from pentameter.parallel.ceiling import product_ceiling

__all__ = ["product_ceiling"]
