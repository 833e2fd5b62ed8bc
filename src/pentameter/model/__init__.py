"""The GPT as a plain PyTorch module: whole or a slice of its layers, with initial weights and
dropout masks computed from keys (seed, name, step) instead of a random generator."""
