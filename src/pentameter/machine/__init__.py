"""The machine a run computes on: what it has, how busy it is, and what is chosen for it."""
