"""Batches for training steps: rows from one data set or a mixture, in a chosen reading order."""
