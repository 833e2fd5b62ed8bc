"""The proof that a configuration trains the same on every layout: `pentameter verify`."""
