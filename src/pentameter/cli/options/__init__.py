"""What several verbs take, and how their arguments are read."""
