"""Checkpoints: saved and loaded by name, committed whole; model folders. Imports torch late."""
