"""Numbers as people read them."""

from __future__ import annotations

import math


def whole(value: int | None) -> str:
    """10,788,929 as it is, in threes; "–" for nothing."""
    return "–" if value is None else f"{value:,}"


def count(value: float) -> str:
    """10,788,929 as "10.8M"; "–" for what is no number."""
    if not math.isfinite(value):
        return "–"
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999,950 would round to 1000.0k
        if abs(value) >= unit * 0.99995:
            scaled = value / unit
            return (
                f"{scaled:.{0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2}f}{letter}"
            )
    return f"{value:g}" if value == int(value) else f"{value:.3g}"


def size(n_bytes: float) -> str:
    """1,500,000 as "1.5 MB"."""
    if not math.isfinite(n_bytes):
        return "–"
    for unit, letter in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.3g} {letter}"
    return f"{n_bytes:.0f} B"


def flops(per_second: float) -> str:
    """2.2e12 as "2.2 TFLOP/s"."""
    return f"{per_second / 1e12:.3g} TFLOP/s" if math.isfinite(per_second) else "–"


def duration(seconds: float) -> str:
    """3,723 as "1 h 2 min": two units at most, of seconds to years of 365 days."""
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


def _two_units(n: int, size: int, large: str, small: str) -> str:
    """`n` small units as large ones of a size, and what is left over, if anything is."""
    whole, rest = divmod(n, size)
    return f"{whole:,} {large} {rest} {small}" if rest else f"{whole:,} {large}"


def fixed(value: float, digits: int = 4) -> str:
    """`value` with so many decimals; "–" for what is no number."""
    return f"{value:,.{digits}f}" if math.isfinite(value) else "–"


def percent(value: float) -> str:
    """0.4213 as "42.1 %"."""
    return f"{100 * value:.1f} %" if math.isfinite(value) else "–"


def scalar(value: object) -> str:
    """A value of a configuration as text: yes and no, lists without brackets, short floats."""
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
