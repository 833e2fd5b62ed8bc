"""The process group: joining it, its rank, what ranks say to each other."""
