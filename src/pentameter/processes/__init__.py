"""The processes of a run: started, joined, named by rank, and reported if one fails."""
