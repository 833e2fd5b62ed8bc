"""The precision that `train.precision = auto` becomes."""

from __future__ import annotations

from collections.abc import Collection


def auto_precision(faster: Collection[str]) -> str:
    """Return the precision for `train.precision = auto`: bf16, else fp16, if it is among the dtypes
    whose matmuls are `faster` than fp32's; else fp32. bf16 has priority even if fp16 is faster
    still, because it has fp32's range and needs no loss scale."""
    return next((each for each in ("bf16", "fp16") if each in faster), "fp32")
