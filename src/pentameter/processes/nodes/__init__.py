"""The nodes of a run: who is on the roll, which attempt it is."""
