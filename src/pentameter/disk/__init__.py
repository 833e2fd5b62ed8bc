"""Crash-safe files, locks between processes, the data and cache folders."""
