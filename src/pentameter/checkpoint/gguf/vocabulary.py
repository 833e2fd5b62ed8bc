"""Tokenizers as a GGUF file holds them: the tokens, how text is split before they are merged, and
the tokens that begin and end a text. What llama.cpp would tokenize otherwise is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import groupby
from typing import Any, NoReturn

from pentameter.config.tables import packaged_table
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.bpe import BpeTokenizer
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.errors import ConfigError

SPACE, ESCAPED_SPACE = " ", "▁"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
NFC_NOTE = (
    "the tokenizer brings text into Unicode's form NFC, and llama.cpp does not: what is not in it "
    "(accents as characters of their own) gets other tokens there"
)


class TokenType(IntEnum):
    """The kind of a token, by llama.cpp's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class Vocabulary:
    """A tokenizer, as the entries `tokenizer.ggml.…` of a GGUF file tell it."""

    model: str
    """llama.cpp's name of the algorithm: `gpt2` (byte-level BPE), `llama` (SentencePiece's BPE) or
    `gemma4` (BPE of characters)."""
    pre: str
    """Its name of the rule by which text is split before tokens are merged."""
    tokens: list[str]
    """By id."""
    types: list[TokenType]
    """By id."""
    merges: list[str] | None = None
    """`left right`, the first one first."""
    scores: list[float] | None = None
    """By id: of two merges, the one into the token with the higher score comes first."""
    adds_space: bool = False
    """True if a space is put before the text."""
    notes: tuple[str, ...] = ()
    """Lines for the user: texts that llama.cpp encodes otherwise."""

    def padded(self, n_rows: int) -> Vocabulary:
        """Append unused tokens, in place, until there are `n_rows`, and return the vocabulary."""
        for number in range(len(self.tokens), n_rows):
            self.tokens.append(f"[PAD{number}]")
            self.types.append(TokenType.UNUSED)
            if self.scores is not None:
                self.scores.append(-1000.0)
        return self


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Return a tokenizer in llama.cpp's form. Raises ConfigError, with the reason, for one that
    llama.cpp cannot express: words, Unigram, other normalizers and rules for splitting."""
    match tokenizer:
        case CharTokenizer():
            return _of_characters(tokenizer)
        case BpeTokenizer():
            return _of_bpe(tokenizer)
        case LibraryTokenizer():
            return _of_library(tokenizer)
        case _:
            refuse(f"its tokenizer ({tokenizer.kind}) cuts text into whole words")


def refuse(reason: str) -> NoReturn:
    """Raise ConfigError for a tokenizer that llama.cpp cannot express; `reason` says what it
    does."""
    raise ConfigError(
        f"llama.cpp cannot tokenize for this model: {reason}; --to hf writes it for transformers "
        "and vLLM, and data.tokenizer='bpe:8192' or 'gpt2' trains one for llama.cpp"
    )


def _of_characters(tokenizer: CharTokenizer) -> Vocabulary:
    """Return the vocabulary of a character tokenizer: BPE of characters without a merge. Of
    llama.cpp's models it is Gemma 4's, the one whose tokens are characters and that has no end of
    text unless the file names one."""
    characters = tokenizer.characters
    if SPACE in characters and ESCAPED_SPACE in characters:
        refuse(f"its characters have both a space and {ESCAPED_SPACE!r}, llama.cpp's sign for one")
    tokens = [ESCAPED_SPACE if each == SPACE else each for each in characters]
    # A merge that never happens: a file without any is refused.
    return Vocabulary(
        "gemma4",
        "gemma4",
        tokens,
        [TokenType.NORMAL] * len(tokens),
        [f"{tokens[0]} {tokens[0]}{tokens[0]}"],
        notes=("llama.cpp leaves out characters that the tokenizer does not know",),
    )


def _of_bpe(tokenizer: BpeTokenizer) -> Vocabulary:
    if tokenizer.end_of_text is None and not tokenizer.special_tokens:
        refuse("its BPE has no end of text, which llama.cpp takes for granted")
    tokens = list(tokenizer.tokens)
    types = [TokenType.NORMAL] * len(tokens)
    for text, number in tokenizer.special_tokens.items():
        tokens[number], types[number] = text, TokenType.CONTROL
    return Vocabulary("gpt2", "gpt-2", tokens, types, [" ".join(each) for each in tokenizer.merges])


def _of_library(tokenizer: LibraryTokenizer) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json: byte-level BPE whose rule for splitting llama.cpp
    knows, or SentencePiece's BPE with tokens for bytes."""
    content = tokenizer.content
    model = content["model"]
    if (kind := model.get("type", "BPE")) != "BPE":
        refuse(f"its tokenizer.json has a {kind} model")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            refuse(f"its tokenizer.json has {key}={model[key]!r}")
    tokens, types = _tokens(tokenizer)
    merges = [
        tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in model["merges"]
    ]
    normalizer = content.get("normalizer")
    if _is_sentencepiece(content):
        return Vocabulary(
            "llama",
            "default",
            tokens,
            types,
            scores=_scores(tokens, types, merges),
            adds_space=_adds_space(content),
        )
    if normalizer and normalizer.get("type") != "NFC":
        refuse(f"its tokenizer.json has the normalizer {normalizer.get('type')}")
    return Vocabulary(
        "gpt2",
        _rule(content),
        tokens,
        types,
        [f"{left} {right}" for left, right in merges],
        notes=(NFC_NOTE,) if normalizer else (),
    )


def _tokens(tokenizer: LibraryTokenizer) -> tuple[list[str], list[TokenType]]:
    """Return the tokens of a tokenizer.json and their types, by id; an id without a token is
    unused."""
    special = {*tokenizer.special_tokens.values()}
    content = tokenizer.content
    added = {each["id"] for each in content.get("added_tokens") or []}
    unknown = content["model"].get("unk_token")
    has_bytes = bool(content["model"].get("byte_fallback"))
    tokens, types = [], []
    for number in range(tokenizer.vocab_size):
        token, kind = tokenizer.token(number), TokenType.NORMAL
        if token is None:
            token, kind = f"[PAD{number}]", TokenType.UNUSED
        elif token == unknown and has_bytes:
            kind = TokenType.UNKNOWN
        elif number in special:
            kind = TokenType.CONTROL
        elif number in added:
            kind = TokenType.USER_DEFINED
        elif has_bytes and _BYTE.fullmatch(token):
            kind = TokenType.BYTE
        tokens.append(token)
        types.append(kind)
    return tokens, types


def _is_sentencepiece(content: Mapping[str, Any]) -> bool:
    """Return True if a parsed tokenizer.json is SentencePiece's BPE, with tokens for single bytes
    and spaces written as ▁."""
    return bool(content["model"].get("byte_fallback")) and _steps(content, "ByteLevel") is None


def _adds_space(content: Mapping[str, Any]) -> bool:
    """Return True if a tokenizer.json of SentencePiece's kind puts a space before a text. Refuses
    one that rewrites text otherwise than to replace spaces."""
    found = False
    parts = [content.get("normalizer"), content.get("pre_tokenizer")]
    while parts:
        match parts.pop():
            case None:
                pass
            case {"type": "Sequence", "normalizers": list(within)}:
                parts += within
            case {"type": "Sequence", "pretokenizers": list(within)}:
                parts += within
            case {"type": "Prepend", "prepend": "▁"}:
                found = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case {
                "type": "Metaspace",
                "replacement": "▁",
                "split": False,
                "prepend_scheme": scheme,
            }:
                found = found or scheme != "never"
            case step:
                kind = step.get("type") if isinstance(step, Mapping) else step
                refuse(f"its tokenizer.json rewrites text by {kind}")
    return found


def _scores(
    tokens: Sequence[str], types: Sequence[TokenType], merges: Sequence[tuple[str, ...]]
) -> list[float]:
    """Return a score for each token by which SentencePiece's algorithm merges as `merges` order.
    Refuses merges that it would not make alike: it merges any two tokens that make a third, so all
    of these must be there, those into one token together."""
    made = [token for token, _ in groupby("".join(each) for each in merges)]
    rank = {token: number for number, token in enumerate(made)}
    known = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    pairs = set(merges)
    is_alike = len(rank) == len(made) and all(
        (token[:cut], token[cut:]) in pairs
        for token in known
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    )
    if not is_alike:
        refuse("its merges are in another order than SentencePiece's scores can give")
    others = -float(len(made))
    return [-float(rank[token]) if token in rank else others for token in tokens]


@cache
def _rules() -> Sequence[Mapping[str, Any]]:
    """Return the rules for splitting text in `pre_tokenizers.toml`."""
    found: Sequence[Mapping[str, Any]] = packaged_table("checkpoint/gguf/pre_tokenizers.toml")[
        "rules"
    ]
    return found


def _rule(content: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for how a parsed tokenizer.json of byte-level BPE splits text.
    Refuses a way that it does not know."""
    found = _steps(content, "ByteLevel")
    if found is not None:
        steps, last = found
        by_gpt2 = bool(last.get("use_regex", True))
        ignores = bool(content["model"].get("ignore_merges"))
        for rule in _rules():
            if (
                steps == rule["steps"]
                and by_gpt2 == rule.get("byte_level", False)
                and ignores == rule.get("ignore_merges", False)
                and not last.get("add_prefix_space")
            ):
                name: str = rule["name"]
                return name
    known = ", ".join(rule["name"] for rule in _rules())
    refuse(f"its tokenizer.json splits text by a rule that is none of these: {known}")


def _steps(
    content: Mapping[str, Any], last: str
) -> tuple[list[str | None], Mapping[str, Any]] | None:
    """Return the pre-tokenizer of a parsed tokenizer.json as (steps, its last one) if that is of
    the type `last`; None if not. A step is its regular expression, "digits", or None for any
    other."""
    whole = content.get("pre_tokenizer") or {}
    within = whole["pretokenizers"] if whole.get("type") == "Sequence" else [whole]
    if not within or within[-1].get("type") != last:
        return None
    return [_step(each) for each in within[:-1]], within[-1]


def _step(step: Mapping[str, Any]) -> str | None:
    match step:
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
            return None if step.get("invert") else pattern
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
    return None
