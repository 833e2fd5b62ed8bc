"""Configurations as files: found, read, overridden, written."""
