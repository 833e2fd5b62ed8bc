"""Evaluation: loss over a whole split, and accuracy on multiple-choice questions."""
