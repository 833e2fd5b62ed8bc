"""Choices made by measuring: how long a run may take, its batch, its layout."""
