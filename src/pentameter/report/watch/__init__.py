"""Runs watched as they go on, and compared."""
