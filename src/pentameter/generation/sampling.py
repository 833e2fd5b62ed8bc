"""Drawing of a token from logits: temperature, top-k, top-p, then a keyed draw, in float64 on the
CPU.

The cumulative distribution is inverted at a uniform number that depends on (seed, sample, position)
alone, so a text does not depend on other samples in its batch.

Shapes: B samples, V vocabulary (without padding).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter import keyed
from pentameter.errors import ConfigError, CorruptError

Floats = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int64]

_AT_ONCE = 2**15
"""Logits of which tokens are drawn at once: what is computed of them stays in a core's cache."""


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing a token from the model's distribution. Raises ConfigError for values out
    of range."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token (the lowest id among equals)."""
    top_k: int | None = None
    """Keep the k likeliest tokens, and those as likely as the k-th. None keeps all."""
    top_p: float | None = None
    """Then keep the smallest set of likeliest tokens with this total probability. None keeps
    all."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"temperature={self.temperature} must be a finite number, 0 (greedy) or more; "
                "try 0.8"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                f"top_k={self.top_k} must be 1 or more; leave it out to keep every token"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p={self.top_p} must be above 0 and at most 1; 1 keeps every token"
            )


def usual_sampling(published: Mapping[str, Any] | None) -> Sampling:
    """Return the settings that a model was published with.

    published: the content of its generation_config.json, `Tokenizer.published_generation`. If that
    is None or says `do_sample: false`, or for values that are no settings, the settings are
    Sampling's.
    """
    if published is None or published.get("do_sample") is False:
        return Sampling()
    names = ("temperature", "top_k", "top_p")
    given = {key: published[key] for key in names if published.get(key)}
    if not all(type(each) in (int, float) for each in given.values()):
        return Sampling()
    try:
        if "top_k" in given:
            given["top_k"] = int(given["top_k"])
        return Sampling(**given)
    except (ValueError, ConfigError):
        return Sampling()


def keep_top_k(logits: Floats, k: int) -> Floats:
    """Return logits (B, V) with all but each sample's k largest (and ties) set to minus
    infinity."""
    if k >= logits.shape[-1]:
        return logits
    smallest_kept = np.partition(logits, -k, axis=-1)[:, -k, None]
    return np.where(logits < smallest_kept, -np.inf, logits)


def keep_top_p(probabilities: Floats, p: float) -> Floats:
    """Return probabilities (B, V), zero outside each sample's nucleus; not renormalised.

    The nucleus is the shortest run of likeliest tokens whose sum reaches p times the total, at
    least one token; ties count by id (Holtzman et al. 2020, arXiv:1904.09751).
    """
    if p >= 1:
        return probabilities
    # Numbers that are not negative rank as their bits do, which are sorted several times as fast.
    ranked = np.sort(probabilities.view(np.int64), axis=-1).view(np.float64)[:, ::-1]
    cumulative = np.cumsum(ranked, axis=-1)
    before = cumulative - ranked  # what the likelier tokens hold already
    n_kept = (before < p * cumulative[:, -1:]).sum(axis=-1, keepdims=True).clip(min=1)
    least = np.take_along_axis(ranked, n_kept - 1, axis=-1)
    likelier, tied = probabilities > least, probabilities == least
    n_tied = n_kept - likelier.sum(axis=-1, keepdims=True)
    kept = likelier | (tied & (np.cumsum(tied, axis=-1) <= n_tied))
    return np.where(kept, probabilities, 0.0)


def choose(logits: Floats, sampling: Sampling, uniforms: Floats) -> Tokens:
    """Draw one token id per sample, (B,) int64, after temperature, top-k and top-p.

    logits: (B, V); uniforms: (B,) in (0, 1), unused if greedy (temperature 0). Raises CorruptError
    for logits that are not finite.
    """
    n_rows = max(1, _AT_ONCE // logits.shape[-1])
    if len(logits) > n_rows:
        parts = [slice(start, start + n_rows) for start in range(0, len(logits), n_rows)]
        return np.concatenate([choose(logits[part], sampling, uniforms[part]) for part in parts])
    peak = logits.max(axis=-1, keepdims=True)
    if not np.isfinite(peak).all():
        raise CorruptError(
            "the model's logits are not finite, so nothing can be sampled: its weights hold NaN or "
            "infinity; sample an earlier checkpoint"
        )
    if sampling.temperature == 0:
        return logits.argmax(axis=-1)
    # The largest becomes 0 before the division, so a tiny temperature cannot overflow to NaN.
    scaled = logits - peak
    with np.errstate(over="ignore"):
        scaled /= sampling.temperature
    ids = None
    if sampling.top_k is not None:
        scaled = keep_top_k(scaled, sampling.top_k)
        ids = np.flatnonzero((scaled > -np.inf).any(axis=0))  # the others add nothing to any sum
        scaled = scaled[:, ids]
    probabilities = np.exp(scaled, out=scaled)
    if sampling.top_p is not None:
        probabilities = keep_top_p(probabilities, sampling.top_p)
    cumulative = np.cumsum(probabilities, axis=-1, out=probabilities)
    # "≤" passes over tokens of probability zero, also at the very start of a row.
    chosen = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(axis=-1)
    return chosen if ids is None else ids[chosen]


def uniform_numbers(seed: int, samples: Iterable[int], positions: npt.NDArray[np.int32]) -> Floats:
    """Return uniform numbers (n_samples, n_positions) in (0, 1), float64, each keyed by (seed,
    sample's number, position in the text) alone."""
    rows = [keyed.bits(keyed.make_key("sample", seed, each), positions) for each in samples]
    words = np.stack(rows).view(np.uint32)
    return (words.astype(np.float64) + 0.5) / 2.0**32
