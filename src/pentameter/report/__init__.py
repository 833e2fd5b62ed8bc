"""HTML pages: one run, and several compared."""
