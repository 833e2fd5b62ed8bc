"""GPUs' own way of computing: faster forms of operations, each tried before a run."""
