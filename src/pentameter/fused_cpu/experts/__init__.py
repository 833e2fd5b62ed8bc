"""The fused step's experts: their routes, rows and grouped matmuls."""
