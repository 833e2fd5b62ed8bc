"""Token shards on disk: written, described, verified, read as one array."""
