"""Everything derived from a configuration, in pure Python. Imports no torch."""
