"""The record of a run: what it leaves in its folder, written and read."""
