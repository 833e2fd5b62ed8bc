"""Bytes that a plan takes: in memory, and sent between ranks."""
