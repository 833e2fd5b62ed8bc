"""Folders that hold checkpoints and models: found, opened, kept, copied."""
