"""Model sources: the built-in GPT, a custom module, adapters on either; their initial values."""
