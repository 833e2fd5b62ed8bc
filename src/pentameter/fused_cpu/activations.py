"""Feed-forward activations and their gradients, each computed in one pass over memory.

In bf16 the C++ kernels (`cpp/activation.h`) contain no formulas: they interpolate in a table that
`curve` builds from the functions here.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from pentameter.fused_cpu.kernels import plus_bias, precise
from pentameter.model.compiled import kernel

_GELU_TANH = math.sqrt(2 / math.pi)


def _normal_cdf(x: Tensor, density: Tensor, *, exact: bool) -> Tensor:
    """Return the standard normal distribution function Φ(x) in x's shape, given `density` = exp(-x²
    / 2).

    exact: use erf. Without it, for results that are rounded to 16 bits anyway, use formula 7.1.26
    by Abramowitz and Stegun (error below 1.5e-7): it shares the exponential with the derivative and
    takes 2/3 as long.
    """
    if exact:
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    t = 1 / (1 + 0.3275911 * math.sqrt(0.5) * x.abs())
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    upper = 0.5 * density * t * (0.254829592 + t * (-0.284496736 + t * series))
    return torch.where(x >= 0, 1 - upper, upper)


# Each returns f(x) and f'(x); results that are not `exact` are rounded to 16 bits.


def _relu(x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    return torch.relu(x), (x > 0).to(x.dtype)


def _relu2(x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    positive = torch.relu(x)
    return positive * positive, 2 * positive


def _silu(x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(x)
    return x * share, share + x * share * (1 - share)


def _gelu(x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    density = torch.exp(-0.5 * x * x)
    share = _normal_cdf(x, density, exact=exact)
    return x * share, share + x * density * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh(x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    # Hendrycks & Gimpel 2016, the form GPT-2 uses
    tanh = torch.tanh(_GELU_TANH * (x + 0.044715 * x * x * x))
    inner = _GELU_TANH * (1 + 3 * 0.044715 * x * x)
    return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner


ACTIVATIONS = {
    "relu": _relu,
    "relu2": _relu2,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "swiglu": _silu,
    "geglu": _gelu,
}
"""Maps a value of `model.feed_forward.activation` to a function (x, exact) → (f(x), f'(x)), in x's
shape. f acts on the first linear's output, in a gated layer (SwiGLU, GeGLU) on the gate alone."""


class Curve(NamedTuple):
    """One activation's table for the C++ kernels, which interpolate in it: `coefficients`
    (4, N_SEGMENTS) for cubic polynomials, the constant term first, and `per_unit`, the
    segments per unit |x|."""

    coefficients: Tensor
    per_unit: float


N_SEGMENTS = 32
RANGE = {"gelu": 5.0, "gelu_tanh": 5.0, "swiglu": 16.0, "geglu": 5.0, "relu": 1.0}
"""Maps an activation to the largest |x| in its table. Beyond it, the function is 0 or x to within
bf16's precision."""


@functools.cache
def curve(kind: str) -> Curve | None:
    """Return the C++ kernels' table for an activation of the form f(x) = x · s(x) with s(-x) = 1 -
    s(x); None for ReLU², which does not have this form. kind: a key in ACTIVATIONS.

    The table holds cubic polynomials in Hermite form for s - 1/2, over N_SEGMENTS equal segments
    from 0 to RANGE[kind]. f is off by less than 3e-5 and f' by less than 2e-4; bf16 rounds by 2e-3,
    relatively.
    """
    if kind not in RANGE:
        return None
    width = RANGE[kind] / N_SEGMENTS
    # At 0, where s is f(x) / x, a point beside it.
    x = torch.linspace(0, RANGE[kind], N_SEGMENTS + 1, dtype=torch.float64).clamp(min=1e-6)
    y, slope = ACTIVATIONS[kind](x, True)
    u, du = y / x - 0.5, (slope - y / x) / x * width
    u[-1], du[-1] = 0.5, 0.0  # so that nothing jumps where the table ends
    first, last, rise, last_rise = u[:-1], u[1:], du[:-1], du[1:]
    step = last - first
    cubic = rise + last_rise - 2 * step
    coefficients = torch.stack([first, rise, step - rise - cubic, cubic]).float()
    return Curve(coefficients, 1 / width)


@kernel
def activate(h: Tensor, bias: Tensor | None, kind: str, gated: bool) -> Tensor:
    """Return f(h + bias) in h's shape (…, N) and dtype. h: the first linear's output without its
    bias. bias: that linear's (N,), or None. kind: the key in ACTIVATIONS that names f.

    If `gated`, N is 2·n: f acts on the first n channels (the gate), and its result multiplies the
    other n; the result is (…, n).
    """
    exact = h.dtype.itemsize > 2
    x, factor = _gate(plus_bias(h, bias), gated)
    y = ACTIVATIONS[kind](x, exact)[0]
    return (y if factor is None else y * factor).to(h.dtype)


@kernel
def activation_gradients(
    g: Tensor, h: Tensor, bias: Tensor | None, kind: str, gated: bool
) -> tuple[Tensor, Tensor]:
    """Return (h's gradient (…, N), the activation's output (…, n)), given that output's gradient g
    (…, n). The output was not saved, and is computed again. The bias's gradient is h's, summed over
    rows.

    h, bias, kind, gated: as passed to `activate`: the first linear's output, its bias (N,) or None,
    the activation's name, and whether half the channels are a gate.
    """
    exact = h.dtype.itemsize > 2
    x, factor = _gate(plus_bias(h, bias), gated)
    y, slope = ACTIVATIONS[kind](x, exact)
    g = precise(g)
    if factor is None:
        return (g * slope).to(h.dtype), y.to(h.dtype)
    g_both = torch.cat((g * slope * factor, g * y), -1)
    return g_both.to(h.dtype), (y * factor).to(h.dtype)


def _gate(h: Tensor, gated: bool) -> tuple[Tensor, Tensor | None]:
    """Split h (…, 2·n) into the gate's channels and those that it multiplies, (…, n) each. If not
    `gated`, return h and None."""
    if not gated:
        return h, None
    x, factor = h.chunk(2, -1)
    return x, factor
