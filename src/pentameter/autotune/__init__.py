"""Choices among layouts: the best one."""
