"""Checkpoints: the commit protocol, save and load by name, the run lock. Imports torch late."""
