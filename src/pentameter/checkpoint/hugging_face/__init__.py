"""Model folders of Hugging Face: those of `transformers` are read, and it opens what is written."""
