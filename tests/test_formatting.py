"""Numbers as people read them: what is written is the number, to the digits shown."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter import formatting

POWERS = {unit: 10.0 ** (3 * i) for i, unit in enumerate(("B", "kB", "MB", "GB", "TB", "PB", "EB"))}
SIZES, COUNTS = POWERS, {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
RATES = {
    f"{unit}FLOP/s": 10.0 ** (3 * i) for i, unit in enumerate(("", "k", "M", "G", "T", "P", "E"))
}
NUMBER = r"-?[\d,]+(?:\.\d+)?(?:e[+-]\d+)?"
near_a_border = st.builds(
    lambda power, share: 10.0**power * share, st.integers(0, 17), st.floats(0.99, 1.01)
)
values = st.floats(-1e18, 1e18) | st.integers(-(10**18), 10**18) | near_a_border


def value_of(text, units):
    """The number that a text says, and how it is written."""
    match = re.fullmatch(rf"({NUMBER}) ?(.*)", text)
    assert match, text
    return float(match[1].replace(",", "")) * units[match[2]], match[1]


@pytest.mark.parametrize(
    ("words", "units"),
    [(formatting.size, SIZES), (formatting.flops, RATES), (formatting.count, COUNTS)],
)
@given(value=values)
def test_a_number_with_a_unit_is_itself_to_three_digits(words, units, value):
    said, written = value_of(words(value), units)
    assert math.isclose(said, value, rel_tol=0.0051, abs_tol=0.51 if units is SIZES else 0)
    if abs(value) >= 1:
        assert "e" not in written
        assert abs(float(written.replace(",", ""))) < 1000 or abs(value) > 0.999e15
    assert not written.startswith("-") or said < 0  # no -0


@given(values, st.integers(0, 6))
def test_fixed_decimals(value, digits):
    said, written = value_of(formatting.fixed(value, digits), {"": 1.0})
    assert math.isclose(said, value, rel_tol=1e-3, abs_tol=0.51 * 10**-digits)
    assert len(written) <= 20
    assert not written.startswith("-") or said < 0


@pytest.mark.parametrize(
    ("words", "value", "said"),
    [(formatting.size, 999_999_999, "1 GB"), (formatting.size, 999_600, "1 MB"),
     (formatting.size, 999.7, "1 kB"), (formatting.size, 1_500_000, "1.5 MB"),
     (formatting.size, 0, "0 B"),
     (formatting.size, -5e9, "-5 GB"), (formatting.size, 12e18, "12 EB"),
     (formatting.size, 5e21, "5,000 EB"), (formatting.size, 1e300, "1e+282 EB"),
     (formatting.count, 999_600, "1.00M"), (formatting.count, 999.7, "1.00k"),
     (formatting.count, 99_960, "100k"), (formatting.count, 10_788_929, "10.8M"),
     (formatting.count, 5e15, "5,000T"), (formatting.count, 999, "999"),
     (formatting.flops, 2.2e12, "2.2 TFLOP/s"), (formatting.flops, 9.9999e14, "1 PFLOP/s"),
     (formatting.flops, 2.8e9, "2.8 GFLOP/s"), (formatting.flops, 0, "0 FLOP/s"),
     (formatting.fixed, 2.6881171418161356e43, "2.688e+43"), (formatting.fixed, -1e-9, "0.0000"),
     (formatting.percent, 0.4213, "42.1 %"), (formatting.percent, 1e308, "–"),
     (formatting.size, math.nan, "–"), (formatting.flops, math.inf, "–")],
)  # fmt: skip
def test_at_the_borders_of_units(words, value, said):
    assert words(value) == said


def test_a_sparkline_has_a_bar_for_each_value():
    assert formatting.sparkline([1, 2, 8, math.nan, 1]) == "▁▂█·▁"
    assert formatting.sparkline([3.0, 3.0]) == "▁▁"
    assert formatting.sparkline([math.inf]) == "·"
    assert formatting.sparkline([]) == ""


def test_little_money_is_not_none():
    said = {0.00417: "0.0042", 0.5: "0.5", 12.345: "12.35", 1234.5: "1,234", math.nan: "–"}
    assert {value: formatting.amount(value) for value in said} == said


@pytest.mark.parametrize(
    ("values", "bars"),
    [([-1e308, 0.0, 1e308], "▁▅█"), ([0.0, 5e-324], "▁▁"), ([1.0, math.inf, 2.0, 1.5], "▁·█▅")],
)
def test_any_finite_numbers_have_bars(values, bars):
    assert formatting.sparkline(values) == bars


@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False))
def test_no_number_is_a_page_of_digits(value):
    for words in (formatting.duration, formatting.rough_duration, formatting.amount):
        assert len(words(value)) < 30
