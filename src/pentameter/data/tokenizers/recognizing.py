"""Encodes text that a chat template wrote, on the `tokenizers` library: special tokens are
recognized where the template wrote them, never in what a message holds."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from pentameter.data.tokenizers.base import Encoded, Ids
from pentameter.data.tokenizers.chat import BEGIN, END, ids_and_texts, unescaped
from pentameter.errors import ConfigError

_FLAGS = {"id": 0, "lstrip": False, "rstrip": False}


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Context manager that raises ConfigError, `the tokenizers library cannot WHAT`, for an error
    in the library. A panic in its Rust code, which is no Exception, counts too."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ConfigError(f"the tokenizers library cannot {what}: {error!s:.300}") from error


def opened(content: Mapping[str, Any]) -> Any:
    """Return the library's tokenizer for a parsed `tokenizer.json`, with truncation and padding
    off; special tokens that occur in a text are encoded as ordinary text."""
    import tokenizers  # here: a process that only counts characters need not load it

    library: Any = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # as ordinary text
    return library


def without_tokens(content: Mapping[str, Any], texts: Collection[str]) -> dict[str, Any]:
    """Return a copy of a parsed `tokenizer.json` without the tokens that are spelled as one of
    `texts`, so that no text becomes one. They leave the vocabulary too, since a model such as
    Unigram finds its words wherever they are spelled. Ids of other tokens change."""
    model = dict(content["model"])
    match model["vocab"]:
        case Mapping() as vocab:
            kept = [each for each in sorted(vocab, key=vocab.__getitem__) if each not in texts]
            model["vocab"] = {text: number for number, text in enumerate(kept)}
        case pieces:  # of Unigram, whose places are their ids
            model["vocab"] = [each for each in pieces if each[0] not in texts]
            if (unknown := model.get("unk_id")) is not None:
                before = (piece for piece, _ in pieces[:unknown])
                model["unk_id"] = unknown - sum(piece in texts for piece in before)
    if merges := model.get("merges"):
        pairs = [each.split(" ") if isinstance(each, str) else each for each in merges]
        model["merges"] = [
            each
            for each, pair in zip(merges, pairs, strict=True)
            if not any(text in texts for text in (*pair, "".join(pair)))
        ]
    added = content.get("added_tokens") or []
    added = [each for each in added if each["content"] not in texts]
    return {**content, "model": model, "added_tokens": added}


class Recognizer:
    """Encodes texts that a chat template wrote, with the tokenizer of a parsed `tokenizer.json`
    (`content`), as transformers does: special tokens are recognized anywhere in the text, with the
    white space that they absorb.

    special: maps text to id for the special tokens.
    reserved: maps id to text for the tokens that no message's text may become.
    """

    def __init__(
        self, content: Mapping[str, Any], special: Mapping[str, int], reserved: Mapping[int, str]
    ) -> None:
        self._content, self._special, self._reserved = content, special, reserved

    def encoded(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the tokens of rendered texts; offsets count characters of the texts after
        `unescaped`.

        If the library finds a special token that the template did not write (a message spells it,
        or its normal form), that text is encoded again, with marks in place of the special tokens
        that the template wrote.
        """
        with library_errors("encode a text"):
            plain = [unescaped(text) for text in texts]
            encodings = self._library.encode_batch(plain, add_special_tokens=False)
            found = list(map(Encoded.of, encodings))
            for number, text in enumerate(texts):
                written = iter(ids_and_texts(text, self._special))
                special = filter(self._reserved.__contains__, found[number].ids.tolist())
                if not all(each in written for each in special):  # `in` goes on behind the last
                    found[number] = self._encoded_by_marks(text)
        return found

    @cached_property
    def _library(self) -> Any:
        library = opened(self._content)
        library.encode_special_tokens = False
        known = {token["content"] for token in self._content.get("added_tokens") or []}
        library.add_special_tokens([text for text in self._special if text not in known])
        return library

    def _encoded_by_marks(self, text: str) -> Encoded:
        library, ids, marks = self._with_marks
        lengths = {number: len(token) for token, number in self._special.items()}
        sizes, texts = [], list[str]()
        for piece in ids_and_texts(text, self._special):
            sizes.append(len(piece) if isinstance(piece, str) else lengths[piece])
            texts.append(piece if isinstance(piece, str) else marks[piece])
        starts, marked = np.cumsum([0, *sizes]), np.cumsum([0, *map(len, texts)])
        encoded = Encoded.of(library.encode("".join(texts), add_special_tokens=False))
        within = np.searchsorted(marked, encoded.offsets, side="right") - 1
        inside = np.minimum(encoded.offsets - marked[within], np.array([*sizes, 0])[within])
        return Encoded(ids[encoded.ids], starts[within] + inside)

    @cached_property
    def _with_marks(self) -> tuple[Any, Ids, Mapping[int, str]]:
        """Return (library, ids, marks): a tokenizer of the `tokenizers` library that recognizes a
        mark in place of each special token; an array that maps each id that it gives to the id in
        `content`; and special token's id → its mark. A mark is a number written in the two
        characters BEGIN and END as binary digits, which no message contains."""
        width = len(self._special).bit_length()
        digits = str.maketrans("01", BEGIN + END)
        marks = {
            number: f"{rank:0{width}b}".translate(digits)
            for rank, number in enumerate(self._special.values())
        }
        content = without_tokens(self._content, self._reserved.values())
        named = {token["content"]: token for token in self._content.get("added_tokens") or []}
        as_it_is = {"special": False, "normalized": False, "single_word": False}
        content["added_tokens"] += [
            {**_FLAGS, **named.get(text, {}), **as_it_is, "content": marks[number]}
            for text, number in self._special.items()
        ]
        library = opened(content)
        tokens = self._library.get_vocab(with_added_tokens=True)
        marked = {mark: number for number, mark in marks.items()}
        return library, ids_of(library, {**tokens, **marked}), marks


def ids_of(library: Any, tokens: Mapping[str, int]) -> Ids:
    """Return an array that maps each id of the library's tokenizer to the id that `tokens` (text →
    id) gives for the same text."""
    here = library.get_vocab(with_added_tokens=True)
    ids = np.zeros(1 + max(here.values(), default=-1), dtype=np.int64)
    for text, number in here.items():
        ids[number] = tokens[text]
    return ids
