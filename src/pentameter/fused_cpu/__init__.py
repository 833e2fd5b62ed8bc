"""Fused training step for CPUs, with the GPT's own parameters and formulas."""
