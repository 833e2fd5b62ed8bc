"""Text into token shards: two passes over the pieces of a text, whatever its size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from pentameter.data.shards import SHARD_TOKENS, ShardWriter
from pentameter.data.storage import building, refuse_existing
from pentameter.data.text import Text
from pentameter.data.tokenizer import (
    N_CODE_POINTS,
    CharTokenizer,
    Tokenizer,
    UnseenCharacterError,
    code_points,
    load_tokenizer,
)
from pentameter.errors import ConfigError, StorageError

Progress = Callable[[str, int, int], None]
"""Called with the pass ("reading", "encoding"), bytes done, and about how many there are."""

READING, ENCODING = "reading", "encoding"


@dataclass(frozen=True)
class Contents:
    """What one pass over a text found."""

    sha256: str
    n_characters: int
    n_bytes: int
    characters: str
    """The distinct characters, sorted; empty when they were not asked for."""


def read_contents(
    text: Text, *, characters: bool = True, progress: Progress | None = None
) -> Contents:
    """Hash, size and (if asked for) the distinct characters of a text, in one pass.

    Raises ConfigError for an empty text, CorruptError and StorageError as reading does.
    """
    digest = hashlib.sha256()
    n_characters = n_bytes = 0
    seen = np.zeros(N_CODE_POINTS, dtype=bool)
    seen_ascii = b""
    for piece in text.pieces():
        data = piece.encode()
        digest.update(data)
        n_characters += len(piece)
        n_bytes += len(data)
        if characters and piece.isascii():
            seen_ascii += bytes(set(data.translate(None, seen_ascii)))  # deletes what is known
        elif characters:
            points = code_points(piece)
            seen[points[~seen[points]]] = True
        if progress is not None:
            progress(READING, n_bytes, text.n_bytes)
    if n_characters == 0:
        raise ConfigError(f"the text {text.name!r} is empty; there is nothing to learn from")
    seen[list(seen_ascii)] = True
    distinct = "".join(map(chr, np.flatnonzero(seen).tolist()))
    return Contents(digest.hexdigest(), n_characters, n_bytes, distinct)


def check_tokenizer_setting(tokenizer: str) -> None:
    """Raise ConfigError for a tokenizer that this version does not have."""
    if tokenizer in {"gpt2", "word", "bpe"} or tokenizer.startswith("bpe:"):
        raise ConfigError(
            f"tokenizer {tokenizer!r} is not available in this version; use 'char' or a tokenizer "
            "file"
        )


def split_ends(
    n_characters: int, validation_fraction: float, test_fraction: float
) -> dict[str, int]:
    """Where train, val and test end, in characters: each takes up where the one before ends.

    Exact decimal arithmetic: 0.9 of 1,115,394 characters are 1,003,854, rounded down.
    """
    test = Fraction(str(test_fraction))
    held_out = Fraction(str(validation_fraction)) + test
    return {
        "train": int((1 - held_out) * n_characters),
        "val": int((1 - test) * n_characters),
        "test": n_characters,
    }


def prepare(
    text: Text,
    folder: Path,
    *,
    tokenizer: str | Tokenizer = "char",
    validation_fraction: float = 0.1,
    test_fraction: float = 0.0,
    contents: Contents | None = None,
    progress: Progress | None = None,
    shard_tokens: int = SHARD_TOKENS,
    keep_existing: bool = False,
) -> None:
    """Write the shards of a text as a new folder, which appears whole or not at all.

    `tokenizer` is `char` (its vocabulary: every character of the whole text), a tokenizer file,
    or a tokenizer.
    The splits are the text's first part, middle and tail, cut between characters. `contents`
    spares the first pass if it is known. With `keep_existing`, a folder that has appeared
    meanwhile is kept.

    Raises ConfigError (tokenizer unknown, character outside its vocabulary, folder exists, empty
    text), CorruptError (not UTF-8 text), StorageError (reading or writing fails, or the text
    changes between the passes).
    """
    ready: Tokenizer | None = None
    if isinstance(tokenizer, str):
        check_tokenizer_setting(tokenizer)
        ready = None if tokenizer == "char" else load_tokenizer(tokenizer)
    else:
        ready = tokenizer
    if not keep_existing:
        refuse_existing(folder)
    if contents is None:
        contents = read_contents(text, characters=ready is None, progress=progress)
    used = ready or CharTokenizer(contents.characters)
    ends = split_ends(contents.n_characters, validation_fraction, test_fraction)
    with (
        building(folder, keep_existing=keep_existing) as unfinished,
        ShardWriter(unfinished, text.name, used, shard_tokens) as writer,
    ):
        sha256 = _encode(text, used, ends, writer, progress)
        if sha256 != contents.sha256:
            raise StorageError(f"the text {text.name!r} changed while it was read; start again")
        writer.finish(
            {
                "sha256": contents.sha256,
                "bytes": contents.n_bytes,
                "characters": contents.n_characters,
            }
        )


def _encode(
    text: Text,
    tokenizer: Tokenizer,
    ends: dict[str, int],
    writer: ShardWriter,
    progress: Progress | None,
) -> str:
    """Write all tokens; sha256 of the text."""
    digest = hashlib.sha256()
    n_characters = n_bytes = 0
    for piece in text.pieces():
        data = piece.encode()
        digest.update(data)
        n_bytes += len(data)
        done = 0
        for split, end in ends.items():
            part = piece[done : max(end - n_characters, done)]
            if part:
                try:
                    ids = tokenizer.encode(part)
                except UnseenCharacterError as error:
                    place = n_characters + done + error.position
                    raise UnseenCharacterError(
                        error.character, place, f"the text {text.name!r}"
                    ) from error
                writer.write(split, ids, len(part.encode()))
                done += len(part)
        n_characters += len(piece)
        if progress is not None:
            progress(ENCODING, n_bytes, text.n_bytes)
    return digest.hexdigest()
