"""Measurements to check the planner's estimates against: steps on this machine, a traced rank."""
