"""The schema of `[model]`, a file for the tables inside it that belong together."""
