"""Curves prepared for drawing: fewer points, less noise, axis limits that ignore outliers."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]
"""Steps and values, float64, with equal lengths."""

Limits = tuple[float, float]
"""Lowest and highest value on an axis."""


@dataclass(frozen=True)
class Series:
    """A curve: steps and values with equal lengths, steps rising, values finite."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    n_non_finite: int = 0
    """Points left out because they are NaN, infinite or too large to draw."""

    def __len__(self) -> int:
        return len(self.steps)

    def after(self, step: float) -> Series:
        """Return the points from `step` on."""
        first = bisect.bisect_left(self.steps, step)
        return Series(self.steps[first:], self.values[first:])


def envelope(series: Series, n_bins: int = 400) -> Curve:
    """Return the curve with at most two points a bin, its lowest and highest, so that no spike is
    lost."""
    x, y = _to_arrays(series)
    if len(x) <= 2 * n_bins:
        return x, y
    edges = np.linspace(0, len(x), n_bins + 1).astype(int)
    kept: list[int] = []
    for first, last in itertools.pairwise(edges):
        bin_y = y[first:last]
        kept.extend(sorted({first + int(bin_y.argmin()), first + int(bin_y.argmax())}))
    return x[kept], y[kept]


def smoothed(series: Series, n_points: int = 400) -> Curve:
    """Return about `n_points` means over the middle half of a centred window.

    The window is a twentieth of the curve. Dropping its highest and lowest quarter keeps one spike
    from lifting a whole stretch. At the start the window narrows, so that it stays centred and does
    not drag along a loss's steep beginning.
    """
    x, y = _to_arrays(series)
    n = len(x)
    widest = max(1, n // 40)
    kept = _evenly(n, n_points)
    means = np.empty(len(kept))
    for position, index in enumerate(kept):
        half = min(int(index), widest)
        window = np.sort(y[index - half : index + half + 1])
        quarter = len(window) // 4
        means[position] = window[quarter : len(window) - quarter].mean()
    return x[kept], means


def thinned(series: Series, n_points: int = 800) -> Curve:
    """Return at most `n_points` evenly spaced points, including the first and the last."""
    x, y = _to_arrays(series)
    kept = _evenly(len(x), n_points)
    return x[kept], y[kept]


def _evenly(n: int, n_points: int) -> np.ndarray:
    """Return at most `n_points` evenly spaced indices below n, including the first and the last."""
    return np.unique(np.linspace(0, max(n - 1, 0), min(n, n_points)).round().astype(int))


def limits(series: tuple[Series, ...], extra: tuple[float, ...] = ()) -> Limits | None:
    """Return the lowest value and a highest one that ignores a few spikes; None without values.

    Every curve's first value, from which a loss starts, counts as no spike. extra: levels that must
    be visible too.
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
"""Fraction of a run after which its loss has left its initial heights."""


def settled_limits(series: tuple[Series, ...], extra: tuple[float, ...] = ()) -> Limits | None:
    """Return limits without the fall at the start, if that would flatten the rest.

    None if there is no such fall: the whole range is then at most twice that after the first tenth.
    """
    whole = limits(series, extra)
    begins = SETTLED * max((one.steps[-1] for one in series if len(one)), default=0)
    after = limits(tuple(one.after(begins) for one in series), extra)
    if whole is None or after is None or after[1] <= after[0]:
        return None
    falls = whole[1] - after[0] > 2 * (after[1] - after[0])
    return (min(whole[0], after[0]), after[1]) if falls else None


def _to_arrays(series: Series) -> Curve:
    """Return steps and values as float64 arrays, (n,) each."""
    return np.asarray(series.steps, dtype=float), np.asarray(series.values, dtype=float)
