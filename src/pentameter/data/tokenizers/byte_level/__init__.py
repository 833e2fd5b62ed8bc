"""Byte-level BPE: words as GPT-2 splits them, each encoded once."""
