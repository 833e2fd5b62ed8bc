"""The choice behind `train.precision = auto`."""

from __future__ import annotations

from collections.abc import Collection


def auto_precision(faster: Collection[str]) -> str:
    """Return bf16, else fp16, if matmuls in that dtype are `faster` than in fp32; else fp32. bf16
    has priority even if fp16 is faster still, because it has the range of fp32 and needs no loss
    scale."""
    return next((each for each in ("bf16", "fp16") if each in faster), "fp32")
