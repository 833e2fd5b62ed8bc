"""Token shards on disk: their format, written, and opened as a data set."""
