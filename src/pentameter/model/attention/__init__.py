"""Attention in its forms, its cache, and its dropout's kernels."""
