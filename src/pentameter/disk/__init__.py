"""Files that survive a crash, locks between processes, and the folders of data."""
