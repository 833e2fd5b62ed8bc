"""Seconds that a plan takes on a cluster."""
