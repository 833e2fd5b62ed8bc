"""Tokenizers that came with a model from elsewhere, run by the program that made them."""
