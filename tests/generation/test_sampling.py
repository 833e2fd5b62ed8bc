"""The filters and the draw, against their definitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.errors import ConfigError, CorruptError
from pentameter.generation.sampling import (
    Sampling,
    choose,
    keep_top_k,
    keep_top_p,
    uniform_numbers,
    usual_sampling,
)

weights = st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any)


@given(weights, st.floats(0.01, 1.0))
def test_nucleus_is_the_shortest_likeliest_run(raw: list[int], p: float) -> None:
    probabilities = np.array([raw], dtype=np.float64)
    kept = keep_top_p(probabilities, p)[0]
    chosen = np.flatnonzero(kept)
    assert len(chosen) >= 1
    assert np.array_equal(kept[chosen], probabilities[0, chosen])
    left_out = np.setdiff1d(np.flatnonzero(raw), chosen)
    assert all(probabilities[0, a] <= probabilities[0, b] for a in left_out for b in chosen)
    if p < 1:
        total = sum(raw)
        assert kept.sum() >= p * total * (1 - 1e-12)
        assert kept.sum() - kept[chosen].min() < p * total * (1 + 1e-12)


@given(weights, st.integers(1, 15))
def test_top_k_keeps_the_k_largest_and_ties(raw: list[int], k: int) -> None:
    logits = np.array([raw], dtype=np.float64)
    kept = np.flatnonzero(np.isfinite(keep_top_k(logits, k)[0]))
    threshold = sorted(raw, reverse=True)[min(k, len(raw)) - 1]
    assert kept.tolist() == [i for i, value in enumerate(raw) if value >= threshold]


def test_filters_treat_rows_apart() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 9))
    for row, k, p in itertools.product(range(5), (1, 3, 9), (0.1, 0.7, 1.0)):
        alone = logits[row : row + 1]
        assert np.array_equal(keep_top_k(logits, k)[row], keep_top_k(alone, k)[0])
        assert np.array_equal(keep_top_p(np.exp(logits), p)[row], keep_top_p(np.exp(alone), p)[0])


@pytest.mark.parametrize("n_tokens", [9, 40_000])
@pytest.mark.parametrize("settings", [Sampling(), Sampling(0.7, 20), Sampling(1.3, 20, 0.8)])
def test_a_row_is_drawn_as_alone_and_from_all_tokens(n_tokens: int, settings: Sampling) -> None:
    """However many rows are drawn at once, and though tokens that are left out are not summed."""
    rng = np.random.default_rng(0)
    logits, uniforms = rng.normal(size=(7, n_tokens)).round(2), rng.random(7)
    drawn = choose(logits, settings, uniforms)
    for row, uniform, token in zip(logits, uniforms, drawn, strict=True):
        scaled = (row[None] - row.max()) / settings.temperature
        weights = np.exp(keep_top_k(scaled, settings.top_k or n_tokens))
        weights = keep_top_p(weights, settings.top_p or 1.0)[0]
        assert token == np.searchsorted(
            np.cumsum(weights), uniform * np.cumsum(weights)[-1], "right"
        )
        assert token == choose(row[None], settings, np.array([uniform]))[0]


def test_the_draw_inverts_the_cumulative_distribution() -> None:
    probabilities = np.array([0.0, 0.25, 0.0, 0.5, 0.25])
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities)
    uniforms = (np.arange(1000) + 0.5) / 1000
    drawn = choose(np.tile(logits, (1000, 1)), Sampling(), uniforms)
    assert np.bincount(drawn, minlength=5).tolist() == [0, 250, 0, 500, 250]
    assert (np.diff(drawn) >= 0).all()
    edges = np.array([0.5 / 2**32, 1 - 0.5 / 2**32])
    assert choose(np.tile(logits, (2, 1)), Sampling(), edges).tolist() == [1, 4]


def test_temperature_divides_the_logits() -> None:
    logits = np.log(np.array([[1.0, 3.0]]))
    squared = choose(np.tile(logits, (1000, 1)), Sampling(0.5), (np.arange(1000) + 0.5) / 1000)
    assert (squared == 0).sum() == 100  # 1 : 3 becomes 1 : 9


@pytest.mark.parametrize("temperature", [0.0, 1e-300])
def test_temperature_zero_and_nearly_zero_are_greedy(temperature: float) -> None:
    logits = np.array([[1.0, 5.0, 5.0 - 1e-9, -2.0], [7.0, 0.0, -1e300, 3.0]])
    uniforms = np.array([0.999999, 0.999999])
    assert choose(logits, Sampling(temperature), uniforms).tolist() == [1, 0]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert choose(np.array([[1.0, 2.0, 2.0]]), Sampling(0), np.array([0.5])).tolist() == [1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_refused(bad: float, temperature: float) -> None:
    with pytest.raises(CorruptError, match="not finite"):
        choose(np.array([[0.0, bad, 1.0]]), Sampling(temperature), np.array([0.5]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": float("nan")}, "top_p=nan"),
    ],
)
def test_wrong_settings_say_value_and_rule(arguments: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Sampling(**arguments)


def test_uniform_numbers_depend_on_seed_sample_and_position_alone() -> None:
    positions = np.arange(5, 500, dtype=np.int32)
    all_of_them = uniform_numbers(3, range(4), positions)
    assert all_of_them.shape == (4, 495)
    assert ((all_of_them > 0) & (all_of_them < 1)).all()
    assert np.array_equal(uniform_numbers(3, range(2), positions[7:9]), all_of_them[:2, 7:9])
    assert len(np.unique(all_of_them)) == all_of_them.size
    assert not np.isin(uniform_numbers(4, range(4), positions), all_of_them).any()
    # Mean of 1980 uniforms: standard deviation 0.2887 / √1980 = 0.0065.
    assert abs(all_of_them.mean() - 0.5) < 4 * 0.0065


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95}', (0.6, 20, 0.95)),
        ('{"temperature": 0.6}', (0.6, None, None)),
        ('{"do_sample": true, "top_k": 0, "temperature": null}', (1.0, None, None)),
        ('{"do_sample": false, "temperature": 0.6}', (1.0, None, None)),
        ('{"temperature": -1}', (1.0, None, None)),
        ('{"temperature": "hot"}', (1.0, None, None)),
        ('{"top_p": true}', (1.0, None, None)),
        ("[]", (1.0, None, None)),
        ("no JSON", (1.0, None, None)),
    ],
)
def test_settings_that_a_model_was_published_with(said, expected):
    tokenizer = CharTokenizer("ab")
    tokenizer.published = {"generation_config.json": said}
    found = usual_sampling(tokenizer.published_generation)
    assert (found.temperature, found.top_k, found.top_p) == expected


def test_a_model_published_without_settings_has_the_usual_ones():
    assert usual_sampling(CharTokenizer("ab").published_generation) == Sampling()
