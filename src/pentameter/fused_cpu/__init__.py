"""Fused training step for CPUs: a GPT's loss and gradients by hand-written kernels, with the plain
model's parameters and formulas."""
