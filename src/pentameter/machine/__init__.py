"""This machine: its devices and cores, choices that follow from them, and child processes."""
