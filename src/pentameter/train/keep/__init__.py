"""Keeping a run: saving, copying, restoring, resuming."""
