"""The tokenizer in a Hugging Face `tokenizer.json`, run by the `tokenizers` library that defines
it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np

from pentameter.data.tokenizers.base import Content, End, Ids, LibraryBacked
from pentameter.data.tokenizers.bpe import refuse_surrogates
from pentameter.errors import ConfigError, CorruptError


class LibraryTokenizer(LibraryBacked):
    """A tokenizer as a `tokenizer.json` describes it: normalizer, pre-tokenizer, model, decoder.

    No token is added before or after a text. Text never becomes a special token, so that no
    document can forge the end of another; added tokens that are not special are recognized in text,
    as they were when the model was trained.
    """

    kind = "library"

    def __init__(self, content: Mapping[str, Any], end_of_text: int | None) -> None:
        """`content` is a parsed `tokenizer.json`, `end_of_text` the id that ends a document, or
        None.

        Raises ConfigError if the library refuses the content, and for an id outside the vocabulary.
        """
        import tokenizers  # here: a process that only counts characters need not load it

        self.content = dict(content)
        try:
            self._library = tokenizers.Tokenizer.from_str(json.dumps(self.content))
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
        """Maps text to id for the tokens that the file marks as special."""
        added = self.content.get("added_tokens") or []
        return {token["content"]: token["id"] for token in added if token.get("special")}

    @classmethod
    def from_content(cls, content: Content) -> Self:
        """Build a tokenizer from a tokenizer file's parsed JSON; CorruptError or ConfigError if it
        is invalid."""
        whole, end_of_text = content.get("tokenizer"), content.get("end_of_text")
        if not isinstance(whole, dict):
            raise CorruptError('"tokenizer" is not an object')
        if end_of_text is not None and type(end_of_text) is not int:
            raise CorruptError(f'"end_of_text" is {end_of_text!r:.80}, not a whole number')
        return cls(whole, end_of_text)

    @classmethod
    def from_tokenizer_json(cls, content: Mapping[str, Any], end: End, warnings: list[str]) -> Self:
        """Build a tokenizer that uses `content`, any parsed `tokenizer.json`, as it is. `end` is
        (token, id) for the end of a document: the token counts if the vocabulary has it, else the
        id if it is in the vocabulary's range, else documents have no end. `warnings` is unused.
        Raises ConfigError if the library refuses the content."""
        tokenizer = cls(content, None)
        token, number = end
        if token is not None and (known := tokenizer._library.token_to_id(token)) is not None:
            number = known
        if number is not None and 0 <= number < tokenizer.vocab_size:
            tokenizer.end_of_text = number
        return tokenizer

    def to_tokenizer_json(self) -> bytes:
        """Return the content, as JSON."""
        return (json.dumps(self.content, ensure_ascii=False, indent=1) + "\n").encode()

    def token(self, number: int) -> str | None:
        """Return the token with the id `number`, spelled as in the file; None if no token has
        it."""
        found: str | None = self._library.id_to_token(number)
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return each text's token ids (n_tokens,), int64, encoded on the library's threads. Raises
        ConfigError for half a surrogate pair.

        A text is never split into chunks: the file decides its token boundaries.
        """
        refuse_surrogates(texts)
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def _fields(self) -> dict[str, Any]:
        return {"tokenizer": self.content, "end_of_text": self.end_of_text}
