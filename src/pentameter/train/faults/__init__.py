"""Faults met by a run: bad steps, flipped bits, slow ranks, memory that runs out."""
