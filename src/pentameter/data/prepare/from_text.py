"""Text into token shards: two passes over a text of any size, the second on all cores.

The first pass finds what the text is: hash, size, characters, splits. The second encodes it
(`encoders.py`) and writes it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.data.corpora.text import Documents, Text, utf8_size
from pentameter.data.prepare.encoders import BATCH_CHARACTERS, batches, encoded, processes_for
from pentameter.data.prepare.splits import (
    IS_BY_DOCUMENT,
    Division,
    Splitting,
    divide,
    split_ends,
    split_of,
)
from pentameter.data.progress import AWAITING, ENCODING, READING, TRAINING, Progress
from pentameter.data.shards.writer import SHARD_TOKENS, ShardWriter
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.char import (
    N_CODE_POINTS,
    CharTokenizer,
    UnseenCharacterError,
    code_points,
)
from pentameter.data.tokenizers.cutting import Cutter
from pentameter.data.tokenizers.setting import build_tokenizer, chosen_tokenizer
from pentameter.disk.atomic import FolderExistsError, refuse_existing
from pentameter.disk.lock import building
from pentameter.errors import ConfigError, StorageError

HELD_OUT_WHOLE = {"val": (1.0, 0.0), "test": (0.0, 1.0)}
"""The fractions for validation and test of a text that is a split of its own."""


@dataclass(frozen=True)
class Contents:
    """A text's hash, size, characters and splits, as one pass over it found them."""

    text: Text
    sha256: str
    """sha256, in hex, of the text and of the documents' bounds in it."""
    n_characters: int
    n_bytes: int
    division: Division
    characters: str = ""
    """The distinct characters, sorted, held-out texts' too; empty when not asked for."""
    held_out: Mapping[str, Contents] = field(default_factory=dict)

    def description(self) -> dict[str, Any]:
        """Hashes and sizes, for the header of shards."""
        sizes = {"sha256": self.sha256, "bytes": self.n_bytes, "characters": self.n_characters}
        held_out = {split: part.description() for split, part in self.held_out.items()}
        return {**sizes, **({"held_out": held_out} if held_out else {})}


class TextDigest:
    """sha256 of a text and of its documents' bounds, as a pass goes on."""

    def __init__(self) -> None:
        self._text, self._bounds = hashlib.sha256(), hashlib.sha256()
        self.n_bytes = 0

    def of(self, documents: Documents) -> Documents:
        """The same documents, noted as they are read."""

        def noted(document: Iterator[str]) -> Iterator[str]:
            for piece in document:
                data = piece.encode()
                self._text.update(data)
                self.n_bytes += len(data)
                yield piece

        for document in documents:
            yield noted(document)
            self._bounds.update(self.n_bytes.to_bytes(8, "little"))

    def hexdigest(self) -> str:
        """sha256, in hex, of text and bounds."""
        return hashlib.sha256(self._text.digest() + self._bounds.digest()).hexdigest()


def read_contents(
    text: Text,
    splitting: Splitting | None = None,
    *,
    characters: bool = True,
    progress: Progress | None = None,
) -> Contents:
    """The contents of a text and of the texts held out beside it, found in one pass.

    With texts held out of its own, `text` is all train. Raises ConfigError for an empty text,
    CorruptError and StorageError as reading does.
    """
    splitting = Splitting(0.0) if text.held_out else splitting or Splitting()
    seen = np.zeros(N_CODE_POINTS if characters else 0, dtype=bool)
    fractions = splitting.validation_fraction, splitting.test_fraction
    by_document = IS_BY_DOCUMENT[splitting.by]
    found = _read(text, fractions, by_document, seen, progress)
    held_out = {
        split: _read(other, HELD_OUT_WHOLE[split], False, seen, progress)
        for split, other in text.held_out.items()
    }
    distinct = "".join(map(chr, np.flatnonzero(seen).tolist()))
    return replace(found, characters=distinct, held_out=held_out)


def _read(
    text: Text,
    fractions: tuple[float, float],
    by_document: bool,
    seen: npt.NDArray[np.bool_],
    progress: Progress | None,
) -> Contents:
    """The contents of one text; its characters are set in `seen`, unless that is empty."""
    digest = TextDigest()
    n_characters = 0
    splits = bytearray()
    for document in digest.of(text.documents()):
        hasher = hashlib.blake2b(digest_size=8)
        for piece in document:
            n_characters += len(piece)
            if by_document:
                hasher.update(piece.encode())
            if seen.size:
                points = code_points(piece)
                if piece.isascii():  # bytes are rid of the known ones faster than looked up
                    known = np.flatnonzero(seen[:128]).astype(np.uint8).tobytes()
                    points = np.frombuffer(points.tobytes().translate(None, known), np.uint8)
                seen[points[~seen[points]]] = True
            if progress is not None:
                progress(READING, digest.n_bytes, max(text.n_bytes, digest.n_bytes))
        if by_document:
            splits.append(split_of(hasher.digest(), *fractions))
    if n_characters == 0:
        raise ConfigError(f"the text {text.name!r} is empty; there is nothing to learn from")
    division = bytes(splits) if by_document else split_ends(n_characters, *fractions)
    return Contents(text, digest.hexdigest(), n_characters, digest.n_bytes, division)


def prepare(
    text: Text,
    folder: Path,
    *,
    tokenizer: str | Tokenizer = "char",
    splitting: Splitting | None = None,
    contents: Contents | None = None,
    progress: Progress | None = None,
    count_tokens: Callable[[int], None] | None = None,
    warnings: list[str] | None = None,
    shard_tokens: int = SHARD_TOKENS,
    n_processes: int | None = None,
    keep_existing: bool = False,
) -> None:
    """Write the shards of a text as a new folder, which appears whole or not at all.

    `tokenizer` is a setting of `data.tokenizer`, or a tokenizer: `char` knows every character of
    the whole text, `word` and `bpe:N` are made from the train split. `contents` spares the first
    pass if it is known. `count_tokens` is told the tokens written so far; `warnings` takes what
    the user should know. `n_processes` encode (0: this one); by default as many as pay. One
    process at a time prepares a folder, others wait; with `keep_existing`, a folder that has
    appeared meanwhile is kept.

    Raises ConfigError (tokenizer unknown, character outside its vocabulary, folder exists, empty
    text), CorruptError (not UTF-8 text), StorageError (reading or writing fails, or the text
    changes between the passes).
    """
    wanted = chosen_tokenizer(tokenizer)
    if not keep_existing:
        refuse_existing(folder)
    if contents is None:
        contents = read_contents(text, splitting, characters=wanted == "char", progress=progress)
    parts = [contents, *contents.held_out.values()]
    n_bytes = sum(part.n_bytes for part in parts)
    tell = progress or (lambda stage, done, total: None)
    kept = [FolderExistsError] if keep_existing else []
    with suppress(*kept), building(folder, lambda: tell(AWAITING, 0, n_bytes)) as unfinished:
        used = _made(wanted, contents, tell, warnings)
        n_processes = processes_for(used, n_bytes) if n_processes is None else n_processes
        with ShardWriter(unfinished, text.name, used, shard_tokens) as writer:
            for n_done in _encode(parts, used, writer, n_processes):
                tell(ENCODING, n_done, n_bytes)
                if count_tokens is not None:
                    count_tokens(writer.n_tokens)
            writer.finish(contents.description())


def _made(
    wanted: str | Tokenizer, contents: Contents, tell: Progress, warnings: list[str] | None
) -> Tokenizer:
    """The tokenizer itself, or the one that the setting makes of the train split."""

    def train_texts(cutter: Cutter) -> Iterator[str]:
        n_done = 0
        for passage in divide(contents.text.documents(), contents.division, cutter):
            n_done += utf8_size(passage.text)
            if passage.split == "train" and passage.text:
                yield passage.text
            tell(TRAINING, n_done, contents.n_bytes)

    if not isinstance(wanted, str):
        return wanted
    if wanted == "char":
        return CharTokenizer(contents.characters)
    return build_tokenizer(wanted, lambda: train_texts(Cutter(wanted)), warnings=warnings)


def _encode(
    parts: Sequence[Contents], tokenizer: Tokenizer, writer: ShardWriter, n_processes: int
) -> Iterator[int]:
    """Write the tokens of all parts; yields the bytes of text done so far.

    Where the tokenizer has one, the end of text follows each document that has tokens. Raises
    StorageError if a text is not that of the first pass.
    """
    digests = [TextDigest() for _ in parts]
    passages = itertools.chain.from_iterable(
        divide(digest.of(part.text.documents()), part.division, Cutter(tokenizer.kind))
        for digest, part in zip(digests, parts, strict=True)
    )
    n_characters = n_bytes = 0
    is_starting = False  # the document at hand has no token yet in the split at hand
    has_tokens = False  # it has one in some split
    # A passage alone where a character may be unknown, so that its place is known.
    size = 1 if tokenizer.kind == "char" else BATCH_CHARACTERS
    try:
        for batch, batch_ids in encoded(batches(passages, size), tokenizer, n_processes):
            for passage, ids in zip(batch, batch_ids, strict=True):
                n_characters += len(passage.text)
                n_bytes += (passage_bytes := utf8_size(passage.text))
                is_starting |= passage.starts
                if len(ids):
                    writer.write(passage.split, ids, passage_bytes, [0] if is_starting else [])
                    is_starting, has_tokens = False, True
                if passage.ends:
                    if has_tokens and tokenizer.end_of_text is not None:
                        writer.write(passage.split, np.array([tokenizer.end_of_text]), 0)
                    is_starting = has_tokens = False
            yield n_bytes
    except UnseenCharacterError as error:
        position = n_characters + error.position
        for part in parts:
            if position < part.n_characters:
                where = f"the text {part.text.name!r}"
                raise UnseenCharacterError(error.character, position, where) from error
            position -= part.n_characters
    for digest, part in zip(digests, parts, strict=True):
        if digest.hexdigest() != part.sha256:
            raise StorageError(
                f"the text {part.text.name!r} changed while it was read; start again"
            )
