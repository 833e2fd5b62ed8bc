import math

import numpy as np
import pytest

from pentameter.record.curves import Series, envelope, limits, smoothed, thinned


def series(values):
    values = [float(v) for v in values]
    return Series(tuple(range(len(values))), tuple(values))


def test_the_envelope_of_a_huge_curve_keeps_its_spikes():
    values = np.zeros(100_000)
    values[12_345], values[77_777] = 9, -9
    x, y = envelope(series(values))
    assert len(x) <= 800
    assert y.max() == 9
    assert y.min() == -9
    assert (np.diff(x) > 0).all()


def test_short_curves_are_left_alone():
    x, y = envelope(series([3, 1, 2]))
    assert (x.tolist(), y.tolist()) == ([0, 1, 2], [3, 1, 2])
    assert thinned(series([3, 1, 2]))[1].tolist() == [3, 1, 2]


def test_thinning_keeps_both_ends():
    x, _ = thinned(series(range(5000)))
    assert len(x) <= 800
    assert (x[0], x[-1]) == (0, 4999)


def test_smoothing_a_line_gives_the_line():
    x, y = smoothed(series(np.arange(1000) * 0.5))
    # but for the end, where the window is not centred
    assert y[:-20] == pytest.approx(x[:-20] * 0.5)


def test_one_spike_does_not_lift_the_smooth_curve():
    values = np.ones(1000)
    values[500] = 100
    assert smoothed(series(values))[1].max() == 1


@pytest.mark.parametrize("n", [0, 1, 2, 3, 39, 40, 41])
def test_smoothing_few_points(n):
    x, y = smoothed(series([2.0] * n))
    assert len(x) == n
    assert (y == 2.0).all()


def test_limits_see_the_start_and_not_a_spike():
    values = [4.0] + [2.0] * 1000
    values[500] = 1e6
    assert limits((series(values), series([])), extra=(1.5,)) == (1.5, 4.0)
    assert limits((series([]),)) is None
    assert limits((), ()) is None
    assert all(math.isfinite(v) for v in limits((series([1.0]),)))
