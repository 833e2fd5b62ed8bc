"""What a run says: on the console, in its events, to trackers."""
