"""Estimates for a Plan: the bytes, messages and seconds that follow from it. No run obeys them."""
