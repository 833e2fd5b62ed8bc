"""The state of a run as tensors with names."""
