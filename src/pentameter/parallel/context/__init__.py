"""Context parallelism: ring attention, and the all-to-all that swaps sequence shards for head
shards."""
