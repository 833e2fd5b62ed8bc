"""Choices among many: the best layout for a configuration, the best values of a sweep."""
