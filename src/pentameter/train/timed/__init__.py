"""A run of a given time: what it is to be, by a law and a trial, and its end."""
