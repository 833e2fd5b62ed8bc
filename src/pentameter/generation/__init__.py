"""Text sampled from a trained model."""
