"""Reasoning and calls of tools in an answer, as each family of models writes them."""
