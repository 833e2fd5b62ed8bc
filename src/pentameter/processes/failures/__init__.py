"""Failures of ranks: who is missing, what it waits for, which error to tell."""
