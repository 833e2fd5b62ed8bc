"""Text to the batch of a step, in five rooms; `open_dataset` joins the first four. No torch."""
