"""Save and load checkpoints by tensor name, each committed atomically, and open model folders (run,
checkpoint or Hugging Face). Importing the package does not import torch."""
