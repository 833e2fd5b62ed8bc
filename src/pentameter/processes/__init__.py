"""A run's processes: started together, joined into one process group, watched, and reported
on if one fails."""
