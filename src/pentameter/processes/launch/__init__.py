"""Starting the processes of a run, on one node or on many."""
