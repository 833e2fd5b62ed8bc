"""Dtypes, autocast and matmul for each `train.precision`, and the loss scale that keeps fp16
gradients representable."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from pentameter.config.choices import PRECISIONS, STREAMS, look_up, refuse_unknown
from pentameter.config.section import NonNegative, Positive, PositiveFloat
from pentameter.model.fp8_matmul import Fp8Matmul
from pentameter.model.gpu.forms import PLAIN_FORMS, GpuForms
from pentameter.model.matmul import PLAIN, Matmul

MATMULS: Mapping[str, Matmul] = {
    "fp64": PLAIN,
    "fp32": PLAIN,
    "tf32": PLAIN,
    "bf16": PLAIN,
    "fp16": PLAIN,
}
"""Maps `train.precision` to the Matmul that linear layers (plain or sharded), head and adapters
call."""


@dataclass(frozen=True)
class Arithmetic:
    """A run's arithmetic: the dtypes of weights and matmuls, the matmul function and the kernels.
    Passed to every module that multiplies."""

    precision: str
    """The `train.precision` value. Custom operations, which take no objects, get this string and
    look up the rest."""
    weights: torch.dtype
    """Dtype of weights, gradients and optimizer state."""
    products: torch.dtype
    """Dtype of matmul inputs."""
    stream: torch.dtype
    """Dtype of the residual stream in training; elsewhere it has the weights'."""
    matmul: Matmul
    in_blocks: Matmul
    """The matmul of the blocks' linear layers if `train.matmuls` asks for one, else PLAIN."""
    forms: GpuForms = PLAIN_FORMS

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype that autocast rounds matmul inputs to; None if it is the weights' dtype."""
        return None if self.products is self.weights else self.products

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Return the autocast context for a forward pass on `device`; a null context if nothing is
        rounded."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.autocast_dtype)


def arithmetic(
    precision: str,
    forms: GpuForms = PLAIN_FORMS,
    matmuls: Literal["fp8"] | None = None,
    stream: str = "weights",
) -> Arithmetic:
    """Return the Arithmetic (dtypes, matmul and kernels) for a `train.precision`, with the faster
    kernels that `forms` names, and for `train.matmuls` and `train.stream`. Raises ConfigError for
    an unknown one, and for `auto`, which must be resolved before."""
    numbers = look_up(PRECISIONS, precision, "train.precision", "the engine")
    weights, products = (getattr(torch, name) for name in (numbers.weights, numbers.products))
    narrow = look_up(STREAMS, stream, "train.stream", "the engine")
    streams = weights if narrow is None else getattr(torch, narrow)
    matmul = forms.matmul(MATMULS[precision])
    match matmuls:
        case None:
            in_blocks = PLAIN
        case "fp8":
            in_blocks = Fp8Matmul(products)
        case unknown:
            refuse_unknown(unknown, "train.matmuls", "the engine")
    return Arithmetic(precision, weights, products, streams, matmul, in_blocks, forms)


def set_matmul_precision(
    asked: Literal["highest", "high", "medium"] | None, precision: str
) -> None:
    """Set torch's global fp32 matmul precision to `asked` (`train.matmul_precision`), or if None to
    the one that `precision` implies. Raises ConfigError for an unknown word, which torch would
    accept. The compiler's advice to allow TF32 is then silenced: this is where that is decided; and
    so is torch's remark that a norm's weights are finer than its input, which is meant."""
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    match asked:
        case None:
            numbers = look_up(PRECISIONS, precision, "train.precision", "the engine")
            torch.set_float32_matmul_precision(numbers.float32_matmul)
        case "highest" | "high" | "medium":
            torch.set_float32_matmul_precision(asked)
        case unknown:
            refuse_unknown(unknown, "train.matmul_precision", "the engine")


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018). A step whose gradients overflow
    halves the scale, to 1 at least, and is skipped; `growth_interval` good steps in a row, counted
    in `good_steps`, double it.

    The overflow test is the gradient norm itself, on which every rank already agrees.
    """

    scale: PositiveFloat = 2.0**16
    good_steps: NonNegative = 0
    growth_interval: Positive = 2000

    def update(self, *, finite: bool) -> None:
        """Halve the scale after a step whose gradients were not `finite` (to 1 at least), or count
        a good step, and double the scale after enough of them."""
        if not finite:
            self.scale = max(1.0, self.scale / 2)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0
