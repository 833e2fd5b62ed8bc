"""HTML reports, comparisons and pictures, made from run folders and plans."""
