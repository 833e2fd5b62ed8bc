"""Crash-safe files, locks between processes, and data folders."""
