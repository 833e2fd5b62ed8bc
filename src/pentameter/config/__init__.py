"""Configuration: schema, TOML with `extends`, dotted overrides, presets. Imports no torch."""
