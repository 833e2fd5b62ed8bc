"""A step's passes that are captured once and replayed."""
