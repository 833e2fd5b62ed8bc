"""The training step of a GPT as few large operations: what makes it fast on a CPU."""

from pentameter.model.fused.kernels import kernel, with_own_code
from pentameter.model.fused.step import architecture_obstacle, fused_loss_sum

__all__ = ["architecture_obstacle", "fused_loss_sum", "kernel", "with_own_code"]
