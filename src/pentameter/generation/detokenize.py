"""Token ids to text as they come, so that the pieces put together are the whole text."""

from __future__ import annotations

from collections.abc import Iterable

from pentameter.data.tokenizers.base import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextPieces:
    """Turns one sample's ids into text piece by piece; all pieces joined equal `decode(all ids)`.

    A byte-level tokenizer can end in the middle of a character, which decodes to U+FFFD for now:
    that last character is held back until the next ids settle it. A tokenizer may also join its
    tokens (words with spaces), so each piece is decoded behind the token before it.

    prompt: ids that the sample continues and that are shown already: the pieces are then what
    decoding all of it adds to them, so that a word is set off from the prompt's last word.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        # The last settled token, then those not settled yet.
        self._ids: list[int] = [int(token) for token in prompt][-1:]
        self._n_shown = len(self._decode(self._ids))  # characters of them that were given out

    def push(self, token: int) -> str:
        """Return the text that `token` settles, perhaps none."""
        self._ids.append(token)
        text = self._decode(self._ids)
        n_settled = len(text) - text.endswith(_INCOMPLETE)
        piece = text[self._n_shown : n_settled]
        self._n_shown = max(self._n_shown, n_settled)
        if n_settled == len(text):
            self._ids = [token]
            self._n_shown = len(self._decode(self._ids))
        return piece

    def flush(self) -> str:
        """Return what was held back, at the end of the sample."""
        piece = self._decode(self._ids)[self._n_shown :]
        self._ids, self._n_shown = [], 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)
