"""Text from a model: the loop over a key/value cache, and how a token is drawn."""
