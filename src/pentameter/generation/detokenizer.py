"""Incremental decoding: token ids, one after another, to text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from pentameter.data.tokenizers.base import NO_ENDS, Ends
from pentameter.generation.stop_texts import StopSearch

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_PARTS = 4
"""Maximum number of tokens for one character: one for each byte of its UTF-8."""
_MOST_BEFORE = 64
"""Maximum number of last tokens among which `_settle` searches for those to keep; if it finds none,
all are kept."""


class Decodes(Protocol):
    """Protocol for what decodes token ids: a tokenizer, or a cache around one."""

    @property
    def byte_ids(self) -> Collection[int]:
        """Ids of tokens that stand for a single byte. Adjacent ones must be decoded together."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text for token ids (n_tokens,)."""


class Detokenizer:
    """Incremental decoder for the ids of one sample: the returned texts joined equal `decode(all
    ids)`, up to what ends the sample.

    Text that later ids may change is held back. Tokens may end in the middle of a character, which
    decodes to U+FFFD until the next id completes it. Where each byte is a token (as in Llama's
    tokenizer), adjacent bytes decode as a whole, or to U+FFFD for each if they are not valid UTF-8;
    so they are held back until another token follows. A tokenizer may also join its tokens with
    spaces, so each is decoded together with some before it.

    prompt: ids before the sample, whose text is shown already. It is not returned again, but a
    space that separates it from the sample is. ends: the tokens and stop texts that end the sample.
    """

    def __init__(
        self, tokenizer: Decodes, prompt: Iterable[int] = (), ends: Ends = NO_ENDS
    ) -> None:
        self._decode, self._byte_ids = tokenizer.decode, tokenizer.byte_ids
        self._end_ids, self._has_stops = ends.tokens, bool(ends.texts)
        self._stops = StopSearch(ends.texts)
        self.is_ended = False
        """True once one of `ends` has come; from then on, `push` returns no text."""
        self.is_settled = True
        """False while text of the last tokens is held back because the next may change it."""
        self._n_shown = 0  # characters of the text of `_ids` that were given out
        self._settle([int(token) for token in prompt])

    def push(self, token: int) -> str:
        """Add `token` and return the text that is complete by now, perhaps empty. Empty once the
        sample has ended."""
        self.is_ended |= token in self._end_ids
        return "" if self.is_ended else self._before_stop(self._decoded(token))

    @property
    def held(self) -> str:
        """The whole characters of the text that is held back: those that may begin a stop text, and
        those that the next ids may still change."""
        return self._stops.held + self._undecided

    @property
    def _undecided(self) -> str:
        """The whole characters that the next ids may still change."""
        if self.is_settled:
            return ""
        ends = range(len(self._ids), len(self._ids) - _MOST_PARTS, -1)
        texts = (self._decode(self._ids[: max(0, end)])[self._n_shown :] for end in ends)
        return next((text for text in texts if not text.endswith(_REPLACEMENT)), "")

    def with_next(self, token: int) -> str:
        """Return the text that `token` would add if it were the next and last one. Nothing is
        changed."""
        if token in self._byte_ids:
            return self._decode([token])
        text = self._decode([*self._ids, token])
        return text[self._n_shown + len(self._undecided) :]

    def flush(self) -> str:
        """Return the text that is held back, at the sample's end, and start anew."""
        piece = self._decode(self._ids)[self._n_shown :]
        self._settle([])
        return "" if self._stops.is_found else self._before_stop(piece) + self._stops.flush()

    def _decoded(self, token: int) -> str:
        """Add `token` and return the text that no later id can change, perhaps empty."""
        self._ids.append(token)
        self.is_settled = False
        if token in self._byte_ids:
            return ""
        text = self._decode(self._ids)
        n_complete = max(self._n_shown, len(text) - text.endswith(_REPLACEMENT))
        piece, self._n_shown = text[self._n_shown : n_complete], n_complete
        if n_complete == len(text):
            self._settle(self._ids)
        return piece

    def _before_stop(self, piece: str) -> str:
        """Return the text that can be shown now that `piece` is decoded; end the sample at a stop
        text."""
        if not self._has_stops:
            return piece
        # What later ids may change, such as the byte of a line's end, may complete a stop text.
        text = self._stops.push(piece, self._undecided)
        self.is_ended |= self._stops.is_found
        return text

    def _settle(self, ids: list[int]) -> None:
        """Remember only as many of the last `ids` as are needed to decode what follows, and the
        text that they decode to: with them, later ids decode as they would after all `ids`. The
        kept ids decode to some text, and do not begin within a character or a run of byte
        tokens."""
        possible = (ids[-n:] for n in range(1, min(_MOST_BEFORE, len(ids)) + 1))
        self._ids = next(filter(self._is_whole, possible), ids)
        self._n_shown = len(self._decode(self._ids))
        self.is_settled = True

    def _is_whole(self, ids: list[int]) -> bool:
        text = "" if ids[0] in self._byte_ids else self._decode(ids)
        return bool(text) and not text.startswith(_REPLACEMENT)
