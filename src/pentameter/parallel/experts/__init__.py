"""Experts on several ranks: their exchange, and the balance of their loads."""
