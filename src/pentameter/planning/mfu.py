"""Model FLOPs utilisation (MFU), for plans and runs alike."""

from __future__ import annotations


def model_flops(flops_per_token: float, tokens_per_second: float) -> float:
    """Return the model's FLOP/s on all devices together. Divided by their peak FLOP/s, this is the
    MFU (Chowdhery et al. 2022, "PaLM", appendix B). `tokens_per_second` is the sum over all devices
    and includes padding, as computed; `flops_per_token` is that in `plan.json`, forward and
    backward without recomputation."""
    return flops_per_token * tokens_per_second
