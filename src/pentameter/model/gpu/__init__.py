"""What GPUs compute in their own way: faster forms of operations, each tried before a run."""
