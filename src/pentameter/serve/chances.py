"""Probabilities of tokens, as a request asks for them: a token's own and those of its rivals, of
the text that is written and of the prompt before it.

V is the vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pentameter.errors import CorruptError
from pentameter.generation.detokenizer import Decodes, Detokenizer
from pentameter.generation.sampling import Floats, Tokens

LEAST_LOGPROB = -9999.0
"""Log-probability sent in place of minus infinity, which JSON lacks; OpenAI's number."""


@dataclass(frozen=True)
class TokenChance:
    """A token with its log-probability, and those of the likeliest tokens at its position."""

    text: str
    """The text that this token adds; the tokens' texts joined are the whole text. A character made
    by several tokens belongs to the last of them; the others have an empty text."""
    logprob: float
    """Natural logarithm of the model's probability, before temperature, top-k and top-p."""
    rivals: Sequence[tuple[str, float]]
    """(text, log-probability) of the likeliest tokens, the likeliest first."""
    offset: int
    """Number of characters in the text before this token."""
    is_first: bool = False
    """True for the first token of a prompt: nothing precedes it, so it has no probability."""


@dataclass
class Chance:
    """A TokenChance (a token with its probability) whose token's text is not known yet, as a
    character may take several tokens."""

    logprob: float
    rivals: Sequence[tuple[str | None, float]]
    """(text, log-probability) as in TokenChance, with None as the text of the token itself."""
    span: tuple[int, int] = (0, 0)
    """The token's text as characters [start, end) of the whole text."""
    is_first: bool = False
    """See TokenChance."""

    def shown(self, text: str, n_before: int = 0) -> TokenChance:
        """Return the finished TokenChance with the token's own text, which is known now: what
        `text`, the whole text so far, has beyond the text before the token. `n_before` characters
        are shown before that text."""
        own = text[slice(*self.span)]
        rivals = [(own if rival is None else rival, chance) for rival, chance in self.rivals]
        return TokenChance(own, self.logprob, rivals, n_before + self.span[0], self.is_first)


def chance_of(token: int, logits: Floats, n_rivals: int, text_of: Callable[[int], str]) -> Chance:
    """Return the probability of `token` and of the `n_rivals` likeliest tokens, computed from the
    logits (V,) at its position. `text_of` gives the text that a rival would add; the token's own is
    not filled in yet."""
    peak = logits.max()
    logprobs = logits - (peak + np.log(np.exp(logits - peak).sum()))
    logprobs = np.maximum(logprobs, LEAST_LOGPROB)
    rivals = [
        (None if i == token else text_of(i), float(logprobs[i]))
        for i in _likeliest(logprobs, n_rivals)
    ]
    return Chance(float(logprobs[token]), rivals)


def _likeliest(logprobs: Floats, n: int) -> list[int]:
    """Return the ids of the n largest of logprobs (V,), the largest first; equal ones are in order
    of their ids, as in the greedy choice."""
    if n == 0:
        return []
    n = min(n, len(logprobs))
    least = np.partition(logprobs, -n)[-n]  # a whole vocabulary is slow to sort
    ids = np.flatnonzero(logprobs >= least)
    found: list[int] = ids[np.lexsort((ids, -logprobs[ids]))][:n].tolist()
    return found


class Echo:
    """A prompt's text and the probabilities of its tokens, gathered while the model reads it.

    prompt: token ids (n,). first_shown: number of the first token whose text is shown. n_rivals:
    number of likeliest tokens to report with each, None for no probabilities.
    """

    def __init__(
        self, prompt: Tokens, first_shown: int, n_rivals: int | None, tokenizer: Decodes
    ) -> None:
        self._ids: list[int] = prompt.tolist()
        self._first_shown, self._n_rivals = first_shown, n_rivals
        self._detokenizer = Detokenizer(tokenizer)
        self._text = ""
        self._n_reached = 0  # characters that tokens make so far, those held back among them
        self._chances: list[Chance] = []
        self._push(Chance(0.0, (), is_first=True))

    @property
    def needs_logits(self) -> bool:
        """True until the probabilities of all tokens are known, if they are asked for."""
        return self._n_rivals is not None and len(self._chances) < len(self._ids)

    def read(self, logits: Floats) -> None:
        """Take the logits (n, V) after the next n tokens of the prompt: they hold the probabilities
        of the tokens that follow these."""
        assert self._n_rivals is not None
        following = self._ids[len(self._chances) :]
        for token, row in zip(following, logits, strict=False):  # the last row is of the text
            self._push(chance_of(token, row, self._n_rivals, self._detokenizer.with_next))

    def shown(self) -> tuple[str, list[TokenChance]]:
        """Return the prompt's text, and its tokens with their probabilities, if asked for."""
        while len(self._chances) < len(self._ids):
            self._push(Chance(0.0, ()))  # no probabilities were asked for
        chances = [] if self._n_rivals is None else self._chances
        return self._text, [each.shown(self._text) for each in chances]

    def _push(self, chance: Chance) -> None:
        """Add the prompt's next token, whose probability is `chance`."""
        index = len(self._chances)
        self._chances.append(chance)
        if index >= self._first_shown:
            self._text += self._detokenizer.push(self._ids[index])
        if index == len(self._ids) - 1:
            self._text += self._detokenizer.flush()
        n_before = self._n_reached
        self._n_reached = max(n_before, len(self._text) + len(self._detokenizer.held))
        chance.span = (n_before, self._n_reached)


def check_finite(logits: Floats) -> None:
    """Raise CorruptError unless the largest logit (V,) is finite."""
    if not np.isfinite(logits.max()):
        raise CorruptError(
            "the model's logits are not finite, so nothing can be sampled: its weights hold NaN or "
            "infinity; serve an earlier checkpoint"
        )
