"""The batch of each step, and the orders of reading."""
