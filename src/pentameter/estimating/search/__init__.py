"""Layouts compared: candidates, their order, their scaling."""
