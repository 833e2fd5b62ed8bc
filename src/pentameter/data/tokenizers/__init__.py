"""Tokenizers: text to token ids and back, each one JSON file."""
