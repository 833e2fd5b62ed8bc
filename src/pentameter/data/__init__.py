"""Data: corpora, tokenizers, token shards, and the batch of each step. Imports no torch."""
