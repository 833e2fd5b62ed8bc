"""The loss over a whole split, and the accuracy on multiple-choice questions."""
