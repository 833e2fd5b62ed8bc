"""PyTorch's fused attention on a CPU as the operations that it consists of, which give and take
log-sum-exps. `scaled_dot_product_attention`, the public way, keeps them to itself."""

from __future__ import annotations

import torch

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(q, k, v, dropout, is_causal) → output (B, H, Q, K), log-sum-exps (B, H, Q)."""
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""(grad, q, k, v, output, log-sum-exps, dropout, is_causal) → gradients for q, k and v."""
