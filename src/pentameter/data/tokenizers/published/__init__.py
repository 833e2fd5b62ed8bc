"""Tokenizers that came with a model from elsewhere, run by the libraries that define them."""
