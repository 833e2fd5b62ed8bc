"""The state of a run (weights, optimizer) as named tensors, and as values that JSON holds."""
