"""What errors offer: the nearest divisors, a few of many names."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from pentameter.errors import few, lone_surrogate, missing_package, nearest_divisors


@given(st.integers(1, 2_000), st.integers(1, 3_000))
def test_they_are_the_nearest(n, wanted):
    near = nearest_divisors(n, wanted)
    every = [d for d in range(1, n + 1) if n % d == 0]
    assert near == sorted(near)
    assert len(near) == min(4, len(every))
    farthest = max(abs(d - wanted) for d in near)
    assert all(abs(d - wanted) >= farthest for d in every if d not in near)


def test_a_huge_prime_takes_no_time():
    start = time.perf_counter()
    assert nearest_divisors(2**31 - 1, 7) == [1, 2**31 - 1]
    assert time.perf_counter() - start < 1  # 46,341 divisions; all of 2³¹ would take minutes


def test_many_names_are_a_few_and_a_number():
    assert few({"b", "a"}) == "a, b"
    assert few(range(9), 3) == "0, 1, 2 and 6 more"


@given(st.text(alphabet=st.characters(codec="utf-8")), st.text())
def test_a_lone_surrogate_is_found_where_it_is(text, rest):
    assert lone_surrogate(text) is None
    assert lone_surrogate(f"{text}\ud83d{rest}") == lone_surrogate(f"{text}\udc00") == len(text)


def test_a_package_that_is_missing_is_named_with_the_way_to_it():
    said = str(missing_package("reading a.zst", "backports.zstd", "zstd", "decompress it"))
    assert said == (
        "reading a.zst needs a package that is not installed (backports.zstd); "
        "`pip install 'pentameter[zstd]'`, or decompress it"
    )
    assert str(missing_package("serve", "fastapi", "serve")).endswith("`")
