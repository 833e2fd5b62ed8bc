"""Ids to text, as they come one after another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_PARTS = 4
"""Most tokens that one character is cut into: one for each byte of its UTF-8."""
_MOST_BEFORE = 64
"""Most tokens that are looked at for those behind which to decode; else all are kept."""


class Decodes(Protocol):
    """A tokenizer's decoder, from ids to text."""

    @property
    def byte_ids(self) -> Collection[int]:
        """The ids that are decoded together with those next to them."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text for token ids (n_tokens,)."""


class Detokenizer:
    """Incremental decoding of one sample's ids; all chunks joined equal `decode(all ids)`.

    A tokenizer can end in the middle of a character, which decodes to U+FFFD for now: it is held
    back until the next id settles it. Where each byte is a token (as in Llama's), a row of them is
    decoded whole, or to U+FFFD for each: it is held back until another token ends it. A tokenizer
    may also join its tokens (words with spaces), so each chunk is decoded behind the one before it.

    prompt: ids before the sample, already shown: the chunks are the text added to theirs, so that a
    word is separated from the prompt's last word. ends: token ids that end the sample.
    """

    def __init__(
        self, tokenizer: Decodes, prompt: Iterable[int] = (), ends: Collection[int] = ()
    ) -> None:
        self._decode, self._byte_ids = tokenizer.decode, tokenizer.byte_ids
        self._ends = ends
        self.is_ended = False
        """Whether one of the tokens `ends` came; from it on, nothing is shown."""
        self._n_shown = 0  # characters of the text of `_ids` that were given out
        self._settle([int(token) for token in prompt])

    def push(self, token: int) -> str:
        """Add `token` and return the text that is now complete, perhaps empty; always empty once
        the sample has ended."""
        self.is_ended |= token in self._ends
        if self.is_ended:
            return ""
        self._ids.append(token)
        self._is_settled = False
        if token in self._byte_ids:
            return ""
        text = self._decode(self._ids)
        n_complete = max(self._n_shown, len(text) - text.endswith(_REPLACEMENT))
        piece, self._n_shown = text[self._n_shown : n_complete], n_complete
        if n_complete == len(text):
            self._settle(self._ids)
        return piece

    @property
    def held(self) -> str:
        """The text that is held back, as far as it has whole characters; the next ids may change
        it."""
        if self._is_settled:
            return ""
        ends = range(len(self._ids), len(self._ids) - _MOST_PARTS, -1)
        texts = (self._decode(self._ids[: max(0, end)])[self._n_shown :] for end in ends)
        return next((text for text in texts if not text.endswith(_REPLACEMENT)), "")

    def with_next(self, token: int) -> str:
        """Return the text that `token` would add to what is shown and held, were it the last."""
        if token in self._byte_ids:
            return self._decode([token])
        text = self._decode([*self._ids, token])
        return text[self._n_shown + len(self.held) :]

    def flush(self) -> str:
        """Return the text still held back, at the sample's end, and start anew."""
        piece = self._decode(self._ids)[self._n_shown :]
        self._settle([])
        return piece

    def _settle(self, ids: list[int]) -> None:
        """Keep the fewest last `ids` behind which others are decoded as behind all: they have a
        text, and do not begin in the middle of a character or of a row of bytes."""
        possible = (ids[-n:] for n in range(1, min(_MOST_BEFORE, len(ids)) + 1))
        self._ids = next(filter(self._is_whole, possible), ids)
        self._n_shown = len(self._decode(self._ids))
        self._is_settled = True

    def _is_whole(self, ids: list[int]) -> bool:
        text = "" if ids[0] in self._byte_ids else self._decode(ids)
        return bool(text) and not text.startswith(_REPLACEMENT)
