"""Numbers and configuration values formatted for people; NaN, infinity and None become "–"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

COUNTS = {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}
BYTES = {"EB": 1e18, "PB": 1e15, "TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
RATES = {"E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
HUGE = 1e9
"""Number from which digits before the decimal point tell nothing: it is written as 2.688e+43."""


def whole(value: int | None) -> str:
    """Format an integer with thousands separators, "10,788,929"; None as "–"."""
    return "–" if value is None else f"{value:,}"


def count(value: float) -> str:
    """Format a large number with a suffix and three significant digits: 10,788,929 is "10.8M". NaN
    and infinity are "–"."""
    if not math.isfinite(value):
        return "–"
    scaled, letter = _scaled(value, COUNTS)
    if not letter:
        return f"{value:zg}" if value == int(value) else f"{value:.3g}"
    n_digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:,.{n_digits}f}{letter}" if abs(scaled) < HUGE else f"{scaled:.3g}{letter}"


def size(n_bytes: float) -> str:
    """Format 1,500,000 bytes as "1.5 MB"; NaN and infinity as "–"."""
    if not math.isfinite(n_bytes):
        return "–"
    scaled, unit = _scaled(n_bytes, BYTES)
    return f"{_three_digits(scaled)} {unit}" if unit else f"{n_bytes:z.0f} B"


def flops(per_second: float) -> str:
    """Format 2.2e12 as "2.2 TFLOP/s", 2.8e9 as "2.8 GFLOP/s"; NaN and infinity as "–"."""
    if not math.isfinite(per_second):
        return "–"
    scaled, unit = _scaled(per_second, RATES)
    return f"{_three_digits(scaled)} {unit}FLOP/s"


def _scaled(value: float, units: Mapping[str, float]) -> tuple[float, str]:
    """Return `value` divided by the largest unit in which it is at least 1 after rounding to
    three digits, and that unit's name; `value` and "" if it is below all. units: name →
    size, largest first."""
    for unit, size_of_one in units.items():
        if abs(value) >= 0.9995 * size_of_one:
            return value / size_of_one, unit
    return value, ""


def _three_digits(value: float) -> str:
    """Format a number with three significant digits, "2.5" or "0.123". A number above 999 keeps all
    digits before the point, "12,345"."""
    whole_only = 999.5 <= abs(value) < HUGE
    return f"{value:,.0f}" if whole_only else f"{value:z.3g}"


def amount(value: float) -> str:
    """Format an amount of money: "1,234", "12.35", and what is less than one with two significant
    digits, "0.0042"; NaN and infinity as "–"."""
    if not math.isfinite(value):
        return "–"
    if abs(value) < 1:
        return f"{value:.2g}"
    if abs(value) >= HUGE**2:
        return f"{value:.3e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.2f}"


def duration(seconds: float) -> str:
    """Format 3,723 seconds as "1 h 2 min": at most two units, from seconds to years with 365 days;
    a negative or infinite one as "–"."""
    if not math.isfinite(seconds) or seconds < 0:
        return "–"
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole, minutes, hours, days = (round(seconds / unit) for unit in (1, 60, 3600, 86_400))
    if minutes < 60:
        short = f"{minutes} min" if whole >= 600 else f"{whole // 60} min {whole % 60} s"
        return f"{whole} s" if whole < 60 else short
    if hours < 24:
        return f"{minutes // 60} h {minutes % 60} min"
    return _two_units(hours, 24, "d", "h") if days < 365 else _two_units(days, 365, "y", "d")


def rough_duration(seconds: float) -> str:
    """Format 3,723 seconds as "1.0 h": one unit, for estimates in narrow columns; a negative or
    infinite one as "–"."""
    if not math.isfinite(seconds) or seconds < 0:
        return "–"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    if seconds < 59.5 * 60:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < HUGE else f"{hours:.3e} h"


def _two_units(n: int, size: int, large: str, small: str) -> str:
    """Format `n` small units as "2 d 3 h": large units, `size` small ones each, then the remainder
    unless it is 0. large, small: their names."""
    whole, rest = divmod(n, size)
    if whole >= HUGE:
        return f"{whole:.3e} {large}"
    return f"{whole:,} {large} {rest} {small}" if rest else f"{whole:,} {large}"


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """Return a string with one bar per value, from ▁ for the smallest to █ for the largest; "·" for
    NaN and infinity."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = max(high / 2 - low / 2, math.ulp(0.0))  # halved, so that no difference overflows
    return "".join(
        BARS[round((len(BARS) - 1) * ((value / 2 - low / 2) / span))]
        if math.isfinite(value)
        else "·"
        for value in values
    )


def fixed(value: float, digits: int = 4) -> str:
    """Format `value` with `digits` decimals; NaN and infinity as "–"."""
    if not math.isfinite(value):
        return "–"
    return f"{value:z,.{digits}f}" if abs(value) < HUGE else f"{value:.3e}"


def percent(value: float) -> str:
    """Format the fraction 0.4213 as "42.1 %"; NaN and infinity as "–"."""
    return f"{fixed(100 * value, 1)} %" if math.isfinite(100 * value) else "–"


def scalar(value: object) -> str:
    """Format a configuration value: booleans as yes and no, None as "–", lists without brackets (an
    empty one as none), floats short; text as it is, quoted only if empty or with blanks at an
    end."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, list | tuple):
        return ", ".join(scalar(item) for item in value) or "none"
    text = str(value)
    return repr(text) if text != text.strip() or not text else text
