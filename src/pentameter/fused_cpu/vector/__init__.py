"""Element-wise operations of the fused step by the vector library, or by `torch.compile`."""
