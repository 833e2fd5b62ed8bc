"""One file per verb. Torch is imported only when a verb does its work."""
