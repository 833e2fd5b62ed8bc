"""The processes of a run: started, joined, named by rank, and told when one fails."""
