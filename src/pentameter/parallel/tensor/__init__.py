"""Tensor parallelism in one dimension, and the collectives that every tensor mode uses."""
