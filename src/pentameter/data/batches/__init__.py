"""Batches for each step, orders of reading, mixtures."""
