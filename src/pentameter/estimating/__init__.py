"""Estimates for a Plan (what a run obeys: sharding, batch, steps): memory, communication and
seconds. No run depends on them."""
