"""Text into token shards: two passes over a text of any size, the second on all cores.

The first pass finds hash, size, distinct characters and split bounds. The second encodes
(`encoders.py`) and writes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.data.corpora.records.rows import SKIP, RowsRead
from pentameter.data.corpora.text import Documents, Text, utf8_size
from pentameter.data.prepare.encoders import encoded_passages
from pentameter.data.prepare.preparation import Contents, Preparation
from pentameter.data.prepare.splits import (
    IS_BY_DOCUMENT,
    Passage,
    SplitBounds,
    Splitting,
    split_passages,
)
from pentameter.data.progress import READING
from pentameter.data.shards.writer import ShardWriter
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.char import (
    N_CODE_POINTS,
    CharTokenizer,
    UnseenCharacterError,
    code_points,
)
from pentameter.data.tokenizers.chunking import Chunker
from pentameter.errors import ConfigError, StorageError


@dataclass(frozen=True, kw_only=True)
class TextContents(Contents):
    """Contents of a text, found in the first pass; the hash covers the text and its documents'
    bounds."""

    kind = "text"

    text: Text
    n_characters: int
    bounds: SplitBounds

    def count(self) -> dict[str, int]:
        """Return {"characters": number of characters}."""
        return {"characters": self.n_characters}

    def train_texts(self, tokenizer: str) -> Iterator[tuple[str, int]]:
        """Yield the text in passages cut for the tokenizer setting (`bpe:8192`), each with the
        UTF-8 bytes read so far. A passage outside the train split is yielded as an empty string."""
        n_done = 0
        for passage in split_passages(self.text.documents(), self.bounds, Chunker(tokenizer)):
            n_done += utf8_size(passage.text)
            yield passage.text if passage.split == "train" else "", n_done

    def encode(self, tokenizer: Tokenizer, writer: ShardWriter) -> Iterator[int]:
        """Write the tokens of this text and those held out, with several processes if that is
        faster; yield the UTF-8 bytes done so far. Raises StorageError if a text has changed since
        the first pass."""
        return _encode(self.parts, tokenizer, writer)


class TextDigest:
    """Computes the sha256 over a text and its documents' bounds while the text is read."""

    def __init__(self) -> None:
        self._text, self._bounds = hashlib.sha256(), hashlib.sha256()
        self.n_bytes = 0

    def hashed(self, documents: Documents) -> Documents:
        """Yield the same documents; the hash and `n_bytes` are updated as their chunks are read,
        each document's before the next is asked for."""

        def noted(document: Iterator[str]) -> Iterator[str]:
            for chunk in document:
                data = chunk.encode()
                self._text.update(data)
                self.n_bytes += len(data)
                yield chunk

        for document in documents:
            yield noted(document)
            self._bounds.update(self.n_bytes.to_bytes(8, "little"))

    def hexdigest(self) -> str:
        """Return the sha256, in hex, over the text and bounds read so far."""
        return hashlib.sha256(self._text.digest() + self._bounds.digest()).hexdigest()


@dataclass(frozen=True)
class TextPreparation(Preparation):
    """A text, which is split by position, in characters, or by document."""

    corpus: Text

    @property
    def remarks(self) -> Sequence[str]:
        """A warning about rows that were left out; none where no row may be, as the text is not
        read for it."""
        return super().remarks if self.corpus.contents.bad_rows == SKIP else ()

    @property
    def key(self) -> dict[str, Any]:
        """JSON values that identify the text in the cache. If its identity is not known without
        reading (local files), the first pass over it is made now."""
        identity = self.corpus.identity
        if identity is None:
            return self.contents.key
        return {"name": self.corpus.name, "text": identity, "held_out": {}}

    def _read(self, corpus: Text, split: str, splitting: Splitting) -> TextContents:
        digest, rows = TextDigest(), RowsRead(corpus.contents.bad_rows)
        n_characters = n_documents = 0
        splits = bytearray()
        by_document = IS_BY_DOCUMENT[splitting.by]
        needs_characters = self.tokenizer == "char" or isinstance(self.tokenizer, CharTokenizer)
        seen = np.zeros(N_CODE_POINTS if needs_characters else 0, dtype=bool)
        for document in digest.hashed(corpus.documents(rows)):
            n_documents += 1
            hasher = hashlib.blake2b(digest_size=8)
            for chunk in document:
                n_characters += len(chunk)
                if by_document:
                    hasher.update(chunk.encode())
                if needs_characters:
                    _note_characters(chunk, seen)
                self.progress(READING, digest.n_bytes, max(corpus.n_bytes, digest.n_bytes))
            if by_document:
                splits.append(splitting.split_of(hasher.digest()))
        if n_characters == 0:
            left_out = f": {rows.first_left_out}" if rows.n_left_out else ""
            raise ConfigError(
                f"the text {corpus.name!r} is empty; there is nothing to learn from{left_out}"
            )
        train_end, val_end, _ = splitting.ends(n_characters)
        by_position = {
            "train": (train_end, val_end, n_characters),
            "val": (0, n_characters, n_characters),
            "test": (0, 0, n_characters),
        }
        return TextContents(
            name=corpus.name,
            sha256=digest.hexdigest(),
            n_bytes=digest.n_bytes,
            own_characters="".join(map(chr, np.flatnonzero(seen).tolist())),
            remarks=rows.warnings(n_documents),
            text=corpus,
            n_characters=n_characters,
            bounds=bytes(splits) if by_document else by_position[split],
        )


def _note_characters(chunk: str, seen: npt.NDArray[np.bool_]) -> None:
    """Set `seen` to True, in place, at the code point of each character in `chunk`. `seen` has an
    element for every code point of Unicode."""
    points = code_points(chunk)
    if chunk.isascii():  # bytes are rid of the known ones faster than looked up
        known = np.flatnonzero(seen[:128]).astype(np.uint8).tobytes()
        points = np.frombuffer(points.tobytes().translate(None, known), np.uint8)
    seen[points[~seen[points]]] = True


@dataclass
class PassageWriter:
    """Writes passages' tokens to shards. Before a document it puts the tokenizer's prefix, after it
    the end of text, if the tokenizer has them; a document without a token gets neither."""

    tokenizer: Tokenizer
    is_starting: bool = False
    """True if the current document has no token yet in the current split."""
    has_tokens: bool = False
    """True if the current document has a token in any split."""

    def write(self, writer: ShardWriter, passage: Passage, ids: npt.NDArray[Any]) -> int:
        """Write a passage's ids (n_tokens,) to its split; return the UTF-8 bytes of its text. If
        the passage ends a document that has tokens, the end of text is written behind it."""
        n_bytes = utf8_size(passage.text)
        self.is_starting |= passage.starts
        if len(ids):
            if self.is_starting and not self.has_tokens and self.tokenizer.prefix:
                ids = np.concatenate([np.array(self.tokenizer.prefix, ids.dtype), ids])
            writer.write(passage.split, ids, n_bytes, [0] if self.is_starting else [])
            self.is_starting, self.has_tokens = False, True
        if passage.ends:
            if self.has_tokens and self.tokenizer.end_of_text is not None:
                # A document whose text in this split has no token begins with its end.
                starts = [0] if self.is_starting else []
                writer.write(passage.split, np.array([self.tokenizer.end_of_text]), 0, starts)
            self.is_starting = self.has_tokens = False
        return n_bytes


def _encode(parts: list[TextContents], tokenizer: Tokenizer, writer: ShardWriter) -> Iterator[int]:
    """Write the tokens of all `parts` (the text, then those held out), with several processes if
    that is faster; yield the UTF-8 bytes done so far. Raises UnseenCharacterError with the text's
    name and position, StorageError if a text has changed since the first pass."""
    digests = [TextDigest() for _ in parts]
    passages = itertools.chain.from_iterable(
        split_passages(digest.hashed(part.text.documents()), part.bounds, Chunker(tokenizer.kind))
        for digest, part in zip(digests, parts, strict=True)
    )
    n_characters = n_bytes = 0
    written = PassageWriter(tokenizer)
    size = sum(part.n_bytes for part in parts)
    try:
        for batch, batch_ids in encoded_passages(passages, tokenizer, size):
            for passage, ids in zip(batch, batch_ids, strict=True):
                n_characters += len(passage.text)
                n_bytes += written.write(writer, passage, ids)
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
