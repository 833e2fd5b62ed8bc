"""Measurements of the speeds that this machine reaches, for the planner."""
