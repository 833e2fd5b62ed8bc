"""What verbs show on a terminal: tables and lines, made of what they were given."""
