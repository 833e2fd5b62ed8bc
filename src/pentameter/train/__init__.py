"""The training loop, its hooks, and everything it writes into a run folder."""
