"""Text to a step's batch, in five rooms; `open_dataset` joins the first four. No torch."""
