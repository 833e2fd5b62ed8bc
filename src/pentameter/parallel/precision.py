"""The values of `train.precision` as torch's dtypes and settings, one literal table; and the scale
that keeps fp16's gradients representable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from pentameter.config.choices import look_up, refuse_unknown
from pentameter.config.section import NonNegative, Positive, PositiveFloat


@dataclass(frozen=True)
class Arithmetic:
    """The dtypes of a precision."""

    weights: torch.dtype
    """The dtype of weights, gradients, optimizer state and the residual stream."""
    products: torch.dtype
    """The dtype of the inputs of a matrix product."""
    matmul: Literal["highest", "high"] = "highest"
    """How exactly a GPU multiplies fp32 where `train.matmul_precision` is absent."""

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype that products are rounded to; None where they are the weights'."""
        return None if self.products is self.weights else self.products


PRECISIONS = {
    "fp64": Arithmetic(torch.float64, torch.float64),
    "fp32": Arithmetic(torch.float32, torch.float32),
    "tf32": Arithmetic(torch.float32, torch.float32, matmul="high"),
    "bf16": Arithmetic(torch.float32, torch.bfloat16),
    "fp16": Arithmetic(torch.float32, torch.float16),
}


def arithmetic(precision: str) -> Arithmetic:
    """The dtypes of a precision that was chosen (not `auto`); ConfigError for one not known."""
    return look_up(PRECISIONS, precision, "train.precision", "the engine")


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a matrix product reads x where autocast is as it is."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def set_matmul_precision(
    asked: Literal["highest", "high", "medium"] | None, precision: str
) -> None:
    """Set torch's precision of fp32 products to `train.matmul_precision`, or to what `precision`
    implies where that is absent. Raises ConfigError for a word that torch would pass over."""
    match asked:
        case None:
            torch.set_float32_matmul_precision(arithmetic(precision).matmul)
        case "highest" | "high" | "medium":
            torch.set_float32_matmul_precision(asked)
        case unknown:
            refuse_unknown(unknown, "train.matmul_precision", "the engine")


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018): a step whose gradients overflow
    halves the scale and is skipped; `growth_interval` good steps in a row double it.

    The overflow test is the gradient norm itself, which every rank already agrees on.
    """

    scale: PositiveFloat = 2.0**16
    good_steps: NonNegative = 0
    growth_interval: Positive = 2000

    def update(self, *, finite: bool) -> None:
        """Record whether the step's gradients were finite."""
        if not finite:
            self.scale = max(1.0, self.scale / 2)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0
