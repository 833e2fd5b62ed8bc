"""Hugging Face architectures, a TOML file each."""
