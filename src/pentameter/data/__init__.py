"""From text to a step's batch: corpora, tokenizers, prepare and shards, joined by `open_dataset`,
then batches. Imports no torch."""
