"""Everything that follows from a configuration, in pure Python. Imports no torch."""
