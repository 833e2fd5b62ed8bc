"""Optimizer groups from the parameter table, the learning rate as a function, gradient clipping."""
