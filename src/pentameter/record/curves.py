"""Curves prepared for drawing: fewer points, less noise, axis limits that ignore outliers."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]
"""Steps and values, float64, with equal lengths."""

Limits = tuple[float, float]
"""Lowest and highest value on an axis."""


@dataclass(frozen=True)
class Series:
    """A curve: steps, strictly rising, and finite values, equally many."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    n_non_finite: int = 0
    """Number of points left out because they are NaN, infinite or too large to draw."""

    def __len__(self) -> int:
        return len(self.steps)

    def after(self, step: float) -> Series:
        """Return the points at `step` and later."""
        first = bisect.bisect_left(self.steps, step)
        return Series(self.steps[first:], self.values[first:])


def envelope(series: Series, n_bins: int = 400) -> Curve:
    """Return the lowest and the highest point in each of `n_bins` bins with equally many points, so
    that no spike is lost; all points if there are at most 2 × `n_bins`."""
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
    """Return about `n_points` running means, each over the middle half (by value) in a centred
    window.

    The window is a twentieth of the curve. Dropping its highest and lowest quarter keeps one spike
    from lifting a whole stretch. At the start the window narrows, so that it stays centred and does
    not drag along a loss's steep beginning.
    """
    x, y = _to_arrays(series)
    n = len(x)
    widest = max(1, n // 40)
    kept = evenly(n, n_points)
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
    kept = evenly(len(x), n_points)
    return x[kept], y[kept]


def evenly(n: int, n_points: int) -> np.ndarray:
    """Return at most `n_points` evenly spaced indices below `n`, the first and the last included,
    int64."""
    return np.unique(np.linspace(0, max(n - 1, 0), min(n, n_points)).round().astype(int))


def limits(series: tuple[Series, ...], extra: tuple[float, ...] = ()) -> Limits | None:
    """Return y limits for several curves, (lowest, highest); None without values.

    For a curve with over 200 values, the 99.5% quantile stands for its highest value, as that
    ignores a few spikes. Every curve's first value is always inside, as are the values `extra`.
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
"""Fraction of a run after which its loss has left the steep fall at the start."""


def settled_limits(series: tuple[Series, ...], extra: tuple[float, ...] = ()) -> Limits | None:
    """Return y limits (lowest, highest) for the curves without the steep fall at a run's start,
    which is its first fraction SETTLED; the values `extra` are within them. Return None if the fall
    does not flatten the rest (with it, the range is at most twice as large), or if no curve has two
    points after it."""
    whole = limits(series, extra)
    begins = SETTLED * max((one.steps[-1] for one in series if len(one)), default=0)
    rest = tuple(one.after(begins) for one in series)
    after = limits(rest, extra)
    if whole is None or after is None or after[1] <= after[0] or max(map(len, rest)) < 2:
        return None
    falls = whole[1] - after[0] > 2 * (after[1] - after[0])
    return (min(whole[0], after[0]), after[1]) if falls else None


def _to_arrays(series: Series) -> Curve:
    """Return steps and values as float64 arrays (n,)."""
    return np.asarray(series.steps, dtype=float), np.asarray(series.values, dtype=float)


@dataclass(frozen=True)
class Spike:
    """A logged loss (`value`) far above those around it."""

    step: int
    value: float
    usual: float
    """Median of the losses around it."""


SPIKE_NEIGHBOURS = 15
"""Number of values on either side that a value is compared with."""

SPIKE_SCATTERS = 6
"""A spike is at least this many times the scatter above the median (see `spikes`)."""

SPIKE_FRACTION = 0.01
"""Least height of a spike above the median, as a fraction of the median."""

_FEWEST_NEIGHBOURS = 3
_WINDOWS_AT_ONCE = 1 << 16  # of a million logged steps: 16 MB


def spikes(series: Series, most: int = 5) -> list[Spike]:
    """Return a curve's spikes, at most `most`, the highest above their neighbours first.

    A value is compared with the median over up to SPIKE_NEIGHBOURS values on either side. It is a
    spike if it exceeds the median by SPIKE_SCATTERS times the scatter, and by SPIKE_FRACTION times
    the median. The scatter is 1.4826 × the median absolute deviation (a normal distribution's
    standard deviation), in the window or over the whole curve, whichever is larger.

    At the start the window narrows, so that it stays centred on a loss that falls; the first three
    values are never spikes. Of adjacent spikes only the highest is returned.
    """
    _, y = _to_arrays(series)
    n = len(y)
    if n <= _FEWEST_NEIGHBOURS:
        return []
    usual, around = y.copy(), np.full(n, np.inf)
    for first, windows in _windows(y):
        last = first + len(windows)
        usual[first:last] = medians = np.median(windows, axis=1)
        around[first:last] = np.median(np.abs(windows - medians[:, None]), axis=1)
    deviations = y - usual
    scatter = 1.4826 * np.maximum(around, np.median(np.abs(deviations)))
    is_spike = deviations > np.maximum(SPIKE_SCATTERS * scatter, SPIKE_FRACTION * np.abs(usual))
    found = []
    for is_one, group in itertools.groupby(range(n), key=lambda index: bool(is_spike[index])):
        if is_one:
            highest = max(group, key=lambda index: float(deviations[index]))
            found.append((float(deviations[highest]), highest))
    return [
        Spike(series.steps[index], series.values[index], float(usual[index]))
        for _, index in sorted(found, reverse=True)[:most]
    ]


def _windows(y: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield windows around each value of y (n,), except the first _FEWEST_NEIGHBOURS, as blocks of
    equal width: (index of the block's first value, its windows (m, width)). Windows are narrower
    near the start and the end."""
    n, half = len(y), SPIKE_NEIGHBOURS
    for index in range(_FEWEST_NEIGHBOURS, min(half, n)):
        yield index, y[None, : 2 * index + 1]
    if n > 2 * half:
        windows = np.lib.stride_tricks.sliding_window_view(y, 2 * half + 1)
        for first in range(0, len(windows), _WINDOWS_AT_ONCE):
            yield half + first, windows[first : first + _WINDOWS_AT_ONCE]
    for index in range(max(half, n - half), n):
        yield index, y[None, index - half :]
