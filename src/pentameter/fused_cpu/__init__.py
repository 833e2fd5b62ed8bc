"""The training step of a GPT as few large operations: what makes it fast on a CPU."""
