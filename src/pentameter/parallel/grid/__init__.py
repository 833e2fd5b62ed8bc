"""Tensor parallelism in 2, 2.5 and 3 dimensions."""
