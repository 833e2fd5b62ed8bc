"""Text and foreign token files made into token shards."""
