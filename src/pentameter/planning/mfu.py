"""Model FLOPs utilisation (MFU), for plans and runs alike."""

from __future__ import annotations


def model_flops(flops_per_token: float, tokens_per_second: float) -> float:
    """Return the model's FLOP/s on all devices together. Divided by their peak FLOP/s, this is the
    MFU (Chowdhery et al. 2022, "PaLM", appendix B). Tokens include padding, as computed; FLOPs are
    those that `plan.json` counts, without recomputation."""
    return flops_per_token * tokens_per_second
