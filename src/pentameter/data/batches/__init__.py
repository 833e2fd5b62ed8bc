"""The batch of each step, and the windows of an evaluation."""
