"""Cores that other programs want too: how busy they are, and how idle threads wait on them."""
