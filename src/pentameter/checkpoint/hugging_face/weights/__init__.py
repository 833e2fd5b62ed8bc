"""Tensors of Hugging Face folders that are not a model's as they lie, such as quantised ones."""
