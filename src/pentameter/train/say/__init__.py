"""Output of a run: on the console, in its events, to trackers."""
