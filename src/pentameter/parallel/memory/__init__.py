"""Memory saved for compute: recomputed activations, weights rounded once per step."""
