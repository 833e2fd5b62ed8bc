"""Hugging Face architectures, a file each."""
