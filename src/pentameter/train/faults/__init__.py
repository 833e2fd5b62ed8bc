"""Faults met by a run: bad steps, flipped bits, slow ranks."""
