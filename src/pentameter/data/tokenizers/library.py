"""A `tokenizer.json` of Hugging Face as it is, on the `tokenizers` library that defines it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pentameter.data.tokenizers.base import Ids, Tokenizer
from pentameter.data.tokenizers.bpe import refuse_surrogates
from pentameter.errors import ConfigError, CorruptError


class LibraryTokenizer(Tokenizer):
    """Whatever a `tokenizer.json` describes: its normaliser, its cuts, its model, its decoder.

    No token is added before or after a text. Text never becomes a special token, so that no
    document can forge the end of another; tokens that were added without being special are found
    in text, as they were when a model was trained.
    """

    kind = "library"

    def __init__(self, content: Mapping[str, Any], end_of_text: int | None) -> None:
        """Take the content of a `tokenizer.json` and the id that ends a document, if one does.

        Raises ConfigError for what the library does not take, and for an id that it does not have.
        """
        import tokenizers  # here: a process that only counts characters need not load it

        self.content = dict(content)
        try:
            self._library: Any = tokenizers.Tokenizer.from_str(json.dumps(self.content))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"the tokenizers library cannot open it: {error!s:.300}") from error
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True  # as ordinary text
        self.vocab_size = 1 + max(
            self._library.get_vocab(with_added_tokens=True).values(), default=-1
        )
        self.end_of_text = end_of_text
        if self.vocab_size == 0:
            raise ConfigError("its vocabulary is empty")
        if end_of_text is not None and not 0 <= end_of_text < self.vocab_size:
            raise ConfigError(
                f"its end of text {end_of_text} is outside the vocabulary 0 … {self.vocab_size - 1}"
            )

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Text → id of the tokens that the file calls special."""
        added = self.content.get("added_tokens") or []
        return {token["content"]: token["id"] for token in added if token.get("special")}

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Self:
        """The tokenizer of a file's content; CorruptError or ConfigError when it is wrong."""
        whole, end_of_text = content.get("tokenizer"), content.get("end_of_text")
        if not isinstance(whole, dict):
            raise CorruptError('"tokenizer" is not an object')
        if end_of_text is not None and type(end_of_text) is not int:
            raise CorruptError(f'"end_of_text" is {end_of_text!r:.80}, not a whole number')
        return cls(whole, end_of_text)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the file writes it; None where there is none."""
        found: int | None = self._library.token_to_id(token)
        return found

    def token(self, number: int) -> str | None:
        """The token of an id as the file writes it; None where there is none."""
        found: str | None = self._library.id_to_token(number)
        return found

    def encode(self, text: str) -> Ids:
        """Token ids (n_tokens,), int64, without any special token.

        Raises ConfigError for half a surrogate pair, which is not text.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The token ids of each text, encoded on the library's threads; errors as `encode`.

        A text is never cut: where its tokens end depends on the file.
        """
        refuse_surrogates(texts)
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of token ids (n_tokens,), special ones as the file writes them.

        Raises ConfigError for an id outside the vocabulary.
        """
        text: str = self._library.decode(self._checked(ids).tolist(), skip_special_tokens=False)
        return text

    def _fields(self) -> dict[str, Any]:
        return {"tokenizer": self.content, "end_of_text": self.end_of_text}
