"""Tables and lines that verbs show on a terminal."""
