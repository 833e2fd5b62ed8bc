"""Constrained decoding: texts held to a grammar, by llguidance.

At each position the grammar says which tokens may follow; the others cannot be drawn. That is a
function of the grammar and of the text so far, so a text remains a function of its request.

V is the vocabulary size.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.data.tokenizers.base import Tokenizer
from pentameter.errors import ConfigError, missing_package

PACKAGE = "llguidance"
_SPECIAL = b"\xff"  # by which llguidance tells a special token, as no text has this byte
_LONGEST_REASON = 300


class Constraints:
    """Compiles grammars for one tokenizer. Raises ConfigError if llguidance is not installed, or
    cannot know the tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise missing_package("constrained decoding", PACKAGE, "serve") from error
        tokens = tokenizer.token_bytes
        if tokens is None:
            raise ConfigError(
                f"the tokenizer ({tokenizer.kind}) decodes tokens by their neighbours, so that "
                "no grammar can say which may follow"
            )
        self._library = llguidance
        self.vocab_size = len(tokens)
        known: Any = _Tokens(tokens)
        self._tokenizer = llguidance.LLTokenizer(known)

    def compiled(self, grammar: str) -> Constraint:
        """Compile a grammar in llguidance's variant of Lark. Raises ConfigError, with the reason,
        for one that it refuses, such as a JSON schema with a keyword that it does not know."""
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ConfigError(_reason(matcher))
        return Constraint(matcher, self.vocab_size)


class _Tokens:
    """A tokenizer for llguidance: the bytes of each token, and one more token that ends a text."""

    def __init__(self, tokens: Collection[bytes]) -> None:
        named = (each or _SPECIAL + f"[{number}]".encode() for number, each in enumerate(tokens))
        self.is_tokenizer_wrapper = True  # by which the library knows its kind
        self.tokens = [*named, _SPECIAL + b"[end]"]
        self.eos_token_id, self.bos_token_id = len(tokens), None
        self.special_token_ids = [n for n, each in enumerate(tokens) if not each]
        self.special_token_ids.append(self.eos_token_id)

    def __call__(self, text: Any) -> list[int]:
        """Return no tokens: the model, not the grammar, chooses how a text is tokenized."""
        return []


class Constraint:
    """A compiled grammar. It is not changed by the texts that are held to it."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def begin(self) -> ConstrainedText:
        """Return the state of a new text."""
        return ConstrainedText(self._matcher.deep_copy(), self._vocab_size)


class ConstrainedText:
    """The state of one text that is held to a grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self, ends: Collection[int]) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow, (V,); the tokens `ends`, which end a text, may where the
        grammar lets it end. Raises ConfigError if none may: the vocabulary lacks what the grammar
        demands, or it is too complex."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(packed, bitorder="little")[: self._vocab_size + 1].astype(bool)
        found, may_end = bits[:-1].copy(), bits[-1]
        found[list(ends)] = may_end
        if not found.any():
            why = f" ({_reason(self._matcher)})" if self._matcher.is_error() else ""
            raise ConfigError(
                "the model's tokenizer has no token that could follow in an answer of this form"
                f"{why}; ask for another form, or none"
            )
        return found

    def push(self, token: int) -> None:
        """Append a token, one of those that are allowed and end no text."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """True if the grammar lets nothing follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()


def _reason(matcher: Any) -> str:
    """Return the first line of what a matcher says of its error, without where in the grammar."""
    said: str = matcher.get_error().strip()
    first, *_ = [*said.splitlines(), "it is too complex"]
    return first.rpartition("JSON schema: ")[2][:_LONGEST_REASON]
