"""Optimizers with parameter groups for weight decay, the learning-rate schedule, and Muon for
sharded matrices."""
