"""Hugging Face model folders: reads those that `transformers` writes, and writes those it opens."""
