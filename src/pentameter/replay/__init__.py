"""A step of a run computed again, from the checkpoint before it, and compared with what the run
recorded. Nothing is written into the run folder."""
