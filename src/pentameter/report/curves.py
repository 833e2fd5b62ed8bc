"""Curves, made fit to draw: fewer points, less noise, limits that an outlier does not set."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]
"""Steps and values, float64, of the same length."""

Limits = tuple[float, float]
"""The lowest and the highest value that an axis shows."""


@dataclass(frozen=True)
class Series:
    """One curve: steps and values of the same length, steps rising, values finite."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    n_non_finite: int = 0
    """Points that are NaN, infinite or too large to be drawn, and so not among the values."""

    def __len__(self) -> int:
        return len(self.steps)

    def after(self, step: float) -> Series:
        """The points from a step on."""
        first = bisect.bisect_left(self.steps, step)
        return Series(self.steps[first:], self.values[first:])


def envelope(series: Series, n_bins: int = 400) -> Curve:
    """The curve with at most two points a bin, its lowest and its highest: no spike is lost."""
    x, y = _arrays(series)
    if len(x) <= 2 * n_bins:
        return x, y
    edges = np.linspace(0, len(x), n_bins + 1).astype(int)
    kept: list[int] = []
    for first, last in itertools.pairwise(edges):
        bin_y = y[first:last]
        kept.extend(sorted({first + int(bin_y.argmin()), first + int(bin_y.argmax())}))
    return x[kept], y[kept]


def smoothed(series: Series, n_points: int = 400) -> Curve:
    """The mean of the middle half of the values around a point, for about `n_points` points.

    The window is a twentieth of the curve. Leaving out its highest and lowest quarter keeps one
    spike from lifting a whole stretch. At the start the window narrows, so that it stays centred
    and does not drag the steep beginning of a loss along.
    """
    x, y = _arrays(series)
    n = len(x)
    widest = max(1, n // 40)
    kept = np.unique(np.linspace(0, max(n - 1, 0), min(n, n_points)).round().astype(int))
    means = np.empty(len(kept))
    for position, index in enumerate(kept):
        half = min(int(index), widest)
        window = np.sort(y[index - half : index + half + 1])
        quarter = len(window) // 4
        means[position] = window[quarter : len(window) - quarter].mean()
    return x[kept], means


def thinned(series: Series, n_points: int = 800) -> Curve:
    """Evenly chosen points of the curve, the first and the last among them."""
    x, y = _arrays(series)
    if len(x) <= n_points:
        return x, y
    kept = np.unique(np.linspace(0, len(x) - 1, n_points).round().astype(int))
    return x[kept], y[kept]


def limits(series: tuple[Series, ...], extra: tuple[float, ...] = ()) -> Limits | None:
    """The lowest value and a highest one that a few spikes do not set; None without values.

    Every curve's first value, where a loss starts, counts as no spike. `extra` are levels that
    must be seen too.
    """
    lows, highs = list(extra), list(extra)
    for one in series:
        if len(one):
            values = np.asarray(one.values)
            lows.append(float(values.min()))
            # the first of a curve with few points may be the only one that is high
            highs += [one.values[0], float(np.quantile(values, 0.995 if len(values) > 200 else 1))]
    if not lows:
        return None
    return min(lows), max(highs)


SETTLED = 0.1
"""The part of a run after which its loss has left the heights where every loss begins."""


def settled_limits(series: tuple[Series, ...], extra: tuple[float, ...] = ()) -> Limits | None:
    """Limits that leave out the fall at the start, where that would flatten what follows it.

    None where the curves have no such fall: the whole of them then is not twice as high as what
    comes after the first tenth of the steps.
    """
    whole = limits(series, extra)
    begins = SETTLED * max((one.steps[-1] for one in series if len(one)), default=0)
    after = limits(tuple(one.after(begins) for one in series), extra)
    if whole is None or after is None or after[1] <= after[0]:
        return None
    falls = whole[1] - after[0] > 2 * (after[1] - after[0])
    return (min(whole[0], after[0]), after[1]) if falls else None


def _arrays(series: Series) -> Curve:
    return np.asarray(series.steps, dtype=float), np.asarray(series.values, dtype=float)
