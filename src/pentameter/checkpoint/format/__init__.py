"""The bytes of a checkpoint: tensors in files, their manifest, who writes which."""
