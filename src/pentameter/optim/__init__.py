"""Optimizer groups from the parameter table, the learning-rate schedule, and Muon for shards."""
