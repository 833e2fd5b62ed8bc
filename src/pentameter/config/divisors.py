"""Which divisors lie near a number that should have divided: what an error can offer."""

from __future__ import annotations

import math


def nearest_divisors(n: int, wanted: int, count: int = 4) -> list[int]:
    """The `count` divisors of `n` nearest to `wanted`, ascending.

    Takes √n divisions, so that a mistyped huge number is refused as fast as any other.
    """
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    divisors = {*small, *(n // d for d in small)}
    return sorted(sorted(divisors, key=lambda d: (abs(d - wanted), d))[:count])
