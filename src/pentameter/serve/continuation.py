"""One text that a model writes: its tokens, the part that can be sent already, and why it ended.

V is the vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from pentameter.data.tokenizers.base import Ends, Tokenizer
from pentameter.generation.detokenizer import Decodes, Detokenizer
from pentameter.generation.sampling import Floats, Sampling, Tokens, uniform_numbers
from pentameter.serve.chances import Chance, Echo, TokenChance, chance_of
from pentameter.serve.constraints import Constraint

_DRAWS_AT_ONCE = 256
_FEW = 16  # tokens whose text is remembered; more are a row of bytes, which hardly comes again


@dataclass
class Piece:
    """Newly written text to send. `chances` are the probabilities of its tokens, empty unless asked
    for. The last piece of a text has a finish reason or an error."""

    text: str = ""
    chances: list[TokenChance] = field(default_factory=list)
    n_tokens: int = 0
    """Tokens sampled so far, over all pieces."""
    finish_reason: str | None = None
    """`stop` (an end token, a stop text, a grammar that lets nothing follow), `length`
    (max_tokens), or None while the text goes on."""
    error: Exception | None = None
    """The error that ended the text; None without one."""

    def joined(self, later: Piece) -> Piece:
        """Return this piece and the following one, `later`, as one."""
        return Piece(
            self.text + later.text,
            self.chances + later.chances,
            later.n_tokens,
            later.finish_reason,
            later.error,
        )


@dataclass(frozen=True)
class TextRequest:
    """One requested text: everything that determines it besides the model. `max_tokens` is its
    greatest length; with 0, only the prompt is shown. Equal `seed` and `sample` draw equal
    tokens."""

    prompt: Tokens
    """Token ids (n,), at least one."""
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    sample: int = 0
    """Index among the texts for the same prompt and seed."""
    ends: frozenset[int] = frozenset()
    """Ids of tokens that end the text and are not part of it."""
    stop: tuple[str, ...] = ()
    """Stop texts, which end the text and are not part of it."""
    echo_from: int | None = None
    """Number of the first token of the prompt that is shown before the text, with its probability;
    None to show none. Those before it have probabilities, but no text."""
    n_rivals: int | None = None
    """Number of likeliest tokens to report with each token; None to report no probabilities
    at all."""
    constraint: Constraint | None = None
    """The grammar to which the text is held; None for any text."""
    follows_text: bool = True
    """True if the text is shown directly behind its prompt: a space that separates the two is then
    kept."""


class CachedDecoder:
    """A tokenizer's `decode` with a cache: texts are decoded a few tokens at a time, and the same
    few tokens recur."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._remembered = lru_cache(maxsize=1 << 16)(tokenizer.decode)
        self.byte_ids = tokenizer.byte_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text for token ids (n_tokens,)."""
        return self._remembered(tuple(ids)) if len(ids) <= _FEW else self._decode(ids)


class Continuation:
    """The state of one requested text (`asked`) while it is written: its tokens, and the text that
    can be sent already."""

    def __init__(self, asked: TextRequest, tokenizer: Decodes) -> None:
        self.asked = asked
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._n_before = 0  # characters of the prompt that are shown before this text
        self._held = None if asked.constraint is None else asked.constraint.begin()
        self._uniforms = np.empty(0)  # for the next tokens, some at a time
        self.echo = None
        if asked.echo_from is not None:
            self.echo = Echo(asked.prompt, asked.echo_from, asked.n_rivals, tokenizer)
        before = asked.prompt.tolist() if asked.follows_text else ()
        self._detokenizer = Detokenizer(tokenizer, before, Ends(asked.ends, asked.stop))
        self._text = ""  # that can be sent
        self._n_reached = 0  # characters that tokens make so far, those held back among them
        self._chances: list[Chance] = []  # not shown yet

    @property
    def uniform(self) -> float:
        """The number in [0, 1) with which the next token is drawn; a function of seed, sample and
        position."""
        asked, number = self.asked, len(self.tokens) % _DRAWS_AT_ONCE
        if number == 0:
            first = len(asked.prompt) + len(self.tokens)
            positions = np.arange(first, first + _DRAWS_AT_ONCE, dtype=np.int32)
            self._uniforms = uniform_numbers(asked.seed, [asked.sample], positions)[0]
        return float(self._uniforms[number])

    def possible(self, logits: Floats) -> Floats:
        """Return logits (V,) with minus infinity for each token that the text's grammar forbids.
        Raises ConfigError if it forbids all."""
        if self._held is None:
            return logits
        return np.where(self._held.allowed(self.asked.ends), logits, -np.inf)

    def push(self, token: int, logits: Floats) -> Piece:
        """Append a token, sampled from logits (V,), and return the text that can be sent now. Sets
        `finish_reason` if the text ends."""
        opening = self._opening() if self.echo else Piece()
        asked, detokenizer = self.asked, self._detokenizer
        chance = None
        if asked.n_rivals is not None:
            chance = chance_of(token, logits, asked.n_rivals, detokenizer.with_next)
        self.tokens.append(token)
        text = detokenizer.push(token)
        is_complete = detokenizer.is_ended
        if self._held is not None and not is_complete:
            self._held.push(token)
            is_complete = self._held.is_complete
        if is_complete or len(self.tokens) == asked.max_tokens:
            text += detokenizer.flush()
            self.finish_reason = "stop" if is_complete or detokenizer.is_ended else "length"
        self._text += text
        if chance is not None and not detokenizer.is_ended:
            n_reached = self._n_reached
            self._n_reached = max(n_reached, len(self._text) + len(detokenizer.held))
            chance.span = (n_reached, self._n_reached)
            self._chances.append(chance)
        elif token in asked.ends and self._chances:
            start, end = self._chances[-1].span
            self._chances[-1].span = (start, max(end, len(self._text)))  # with an incomplete end
        return opening.joined(self._new(text))

    def finish(self) -> Piece:
        """End a text that has no tokens; return its Piece, in which the prompt may be shown."""
        self.finish_reason = "length"
        return (self._opening() if self.echo else Piece()).joined(self._new(""))

    def _opening(self) -> Piece:
        """Return the Piece that shows the prompt; it is told once."""
        assert self.echo is not None
        text, chances = self.echo.shown()
        self.echo, self._n_before = None, len(text)
        return Piece(text, chances)

    def _new(self, text: str) -> Piece:
        """Return, as a Piece, the text that is newly shown, and the tokens that were not returned
        before. Each token whose text contains a character that is held back is kept back, too, as
        it would reveal it, and the last one while it ends within a character."""
        end, known = len(self._text), self._chances
        if not self.finish_reason and not self._detokenizer.is_settled:
            known = known[:-1]
        ready = [each.shown(self._text, self._n_before) for each in known if each.span[1] <= end]
        self._chances = self._chances[len(ready) :]
        return Piece(text, ready, len(self.tokens), self.finish_reason)
