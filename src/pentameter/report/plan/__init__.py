"""A plan, told as text and as a page."""
