"""Measurements that the planner's estimates are based on or checked against: this machine's CPU,
timed; one rank's memory, traced."""
