"""Special tokens by the `tokenizers` library: recognized in what a chat template wrote, never in
what a person did.
"""

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
    """Raise ConfigError for an error of the library or a panic in it, which is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ConfigError(f"the tokenizers library cannot {what}: {error!s:.300}") from error


def opened(content: Mapping[str, Any]) -> Any:
    """Return the library's object for a parsed `tokenizer.json`, which adds nothing to a text and
    takes nothing away."""
    import tokenizers  # here: a process that only counts characters need not load it

    library: Any = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # as ordinary text
    return library


def without_tokens(content: Mapping[str, Any], texts: Collection[str]) -> dict[str, Any]:
    """Return a copy of a parsed `tokenizer.json` without the tokens that are spelled as `texts`,
    so that no text becomes one. A model may know them as words like any other, as Unigram does, and
    find them wherever they are spelled. The ids of others change."""
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
    """Encodes what a chat template wrote, by a parsed `tokenizer.json` (`content`), as transformers
    does: special tokens are recognized in the whole text, with the white space that they take.

    special: maps text to id for the special tokens. reserved: the ids that no text becomes, each
    with its token.
    """

    def __init__(
        self, content: Mapping[str, Any], special: Mapping[str, int], reserved: Mapping[int, str]
    ) -> None:
        self._content, self._special, self._reserved = content, special, reserved

    def encoded(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the tokens of rendered texts, with offsets in the unescaped ones.

        Where another special token is found than the template wrote (one that a message spells, or
        whose normal form it has), the text is encoded again, with marks in place of those written.
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
        """The library's object that recognizes marks in place of special tokens, the id of each id
        that it gives, and the mark of each special token: BEGIN and END, which no message holds, as
        the digits of a number."""
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
    """Return, for each id that the library's object gives, the id that `tokens` maps its text
    to."""
    here = library.get_vocab(with_added_tokens=True)
    ids = np.zeros(1 + max(here.values(), default=-1), dtype=np.int64)
    for text, number in here.items():
        ids[number] = tokens[text]
    return ids
