"""Text generation: sampling tokens from a trained model, and decoding them."""
