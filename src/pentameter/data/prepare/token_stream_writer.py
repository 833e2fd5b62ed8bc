"""Writes a text as the parts of a token stream (`shards/token_stream.py`), one after another.

Any later process can continue: each part records how far it got, as a file and the number of its
passages written. A passage is a piece of text that is encoded by itself; where passages end depends
only on the file and the kind of tokenizer. The text's length is not known beforehand, so held-out
splits come first: they are separate texts, or the text's first passages.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from pentameter.data.corpora.files import InputFile
from pentameter.data.corpora.text import Text, first_bytes, utf8_size
from pentameter.data.prepare.encoders import encoded_passages
from pentameter.data.prepare.from_text import PassageWriter
from pentameter.data.prepare.preparation import known_by
from pentameter.data.prepare.splits import Passage, Splitting, split_passages
from pentameter.data.shards.format import TOKENIZER_FILE
from pentameter.data.shards.token_stream import (
    BLOCK_TOKENS,
    END_FILE,
    PART_NAME,
    n_parts_of,
    part_header,
)
from pentameter.data.shards.writer import ShardWriter
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.char import UnseenCharacterError
from pentameter.data.tokenizers.chunking import Chunker, chunks
from pentameter.data.tokenizers.setting import build_tokenizer, load_tokenizer
from pentameter.disk.atomic import FolderExistsError, read_json, sha256_of_json, write_atomic
from pentameter.disk.lock import building
from pentameter.errors import ConfigError, StorageError

FIRST_TOKENS = BLOCK_TOKENS + 1
"""Minimum training tokens in the first part: one block of `data.order = "streamed"`, and the last
target in it."""
LARGEST_TOKENS = 1 << 26
"""Maximum training tokens per part, about. Each part has twice the tokens of the one before up to
this: few files, and a quick start."""
MOST_HELD_OUT_BYTES = 1 << 23
"""Maximum UTF-8 bytes held out per split from the text's start: training waits for them."""
MOST_OVER = 0.01
"""Largest fraction of the text by which a held-out split may exceed its size, so that it can end
with a whole passage if that is short, and keeps its end when a file changes a little."""
WORD_CHARACTERS = 1000
"""Characters after the place for a cut within which the end of a word is looked for."""
LEARNED_BYTES = 1 << 26
"""UTF-8 bytes, from the start of the training split, on which a tokenizer is trained."""
NICENESS = 10
"""Added to the background process's niceness, because the run computes on the same cores."""
WHOLE = (sys.maxsize, sys.maxsize, sys.maxsize)
"""`SplitBounds` for a text that is not split: all of it is train."""
HASH_THREADS = 8  # files at once, as where shards are checked


@dataclass(frozen=True)
class Origin:
    """All that determines the tokens of a text that is tokenized during training: the text's files,
    the tokenizer and the splits. A frozen record."""

    text: Text
    tokenizer: str | Tokenizer
    """A tokenizer, or the setting for one that is trained on the text's beginning."""
    splitting: Splitting
    keys: tuple[Any, ...]
    """For each of `files`, JSON values that identify its content: its key if it has one, else its
    sha256. A file that changes during a run is noticed by it."""
    first_tokens: int
    """Minimum training tokens in the first part; each later part has twice as many, up to
    LARGEST_TOKENS."""

    @property
    def files(self) -> list[tuple[str, InputFile]]:
        """(split, file) pairs in the order of the stream: held-out files, then train."""
        return self.text.files_by_split()

    @property
    def key(self) -> dict[str, Any]:
        """JSON values that decide the tokens; the hash covers them."""
        text, splitting = self.text, self.splitting
        fractions = [splitting.validation_fraction, splitting.test_fraction]
        names = [(split, file.name) for split, file in self.files]
        return {
            "name": text.name,
            # Raise it when parts must change for the same text and settings. At 1, held-out splits
            # ended with whole passages, however long.
            "stream": 2 if any(fractions) and not text.held_out else 1,
            "files": [[*name, key] for name, key in zip(names, self.keys, strict=True)],
            "contents": text.contents.key,
            "max_bytes": text.max_bytes,
            "tokenizer": known_by(self.tokenizer),
            "held_out": fractions,
            "first_tokens": self.first_tokens,
        }

    @property
    def hash(self) -> str:
        """The sha256, in hex, over `key`."""
        return sha256_of_json(self.key)


def origin_of(text: Text, tokenizer: str | Tokenizer, splitting: Splitting) -> Origin:
    """Return the Origin of a text's token stream; local files are read once for their sha256.

    Raises ConfigError for a tokenizer that must know the whole text (`char`), and for a split by
    document: validation must be known before the first step, and any later document could belong to
    it.
    """
    if tokenizer == "char":
        raise ConfigError(
            "data.order='streamed' begins before the whole text is read, and data.tokenizer='char' "
            "must know all its characters; use bpe:8192, gpt2 or a tokenizer file"
        )
    if splitting.by != "position":
        raise ConfigError(
            f"data.split_by={splitting.by!r} knows the validation split when the whole text is "
            "read, and data.order='streamed' begins before; use 'position', which holds out the "
            "first text of a stream, or data.validation_path"
        )
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        keys = tuple(pool.map(_known_by, (file for _, file in text.files_by_split())))
    return Origin(text, tokenizer, splitting, keys, FIRST_TOKENS)


def _known_by(file: InputFile) -> Any:
    """Return JSON values that identify a file's content: its `key` if that is known without reading
    it, else its sha256 in hex."""
    return file.key or file.sha256()


@dataclass(frozen=True)
class Position:
    """The progress of tokenizing a text: counts of passages, the pieces of a document's text that
    are encoded by themselves, and of what they hold. A frozen record in the header of each part,
    from which any later process can go on."""

    file: int = 0
    """Index, in `Origin.files`, of the file with the last passage written."""
    n_passages: int = 0
    """Number of passages written from that file, counted from its start."""
    bytes_before: int = 0
    """UTF-8 bytes of text in the training files before that file."""
    is_starting: bool = False
    """True if the current document has no token yet in the current split."""
    has_tokens: bool = False
    """True if the current document has a token in any split. This and `is_starting` restore the
    state of a `PassageWriter`."""


class _NothingLeftError(Exception):
    """Raised when the text has no more tokens to write."""


class Parts:
    """Writes the tokens of a text part by part, while a run trains on earlier parts: each call of
    `write_next` writes one folder of shards into `folder`. `origin` has the text, the tokenizer and
    the splits."""

    def __init__(self, origin: Origin, folder: Path) -> None:
        self._origin, self._folder, self._hash = origin, folder, origin.hash
        self._next: int | None = None
        """Index of the part that `_encoded` is positioned at; None before the first."""
        self._written: PassageWriter
        self._encoded: Iterator[tuple[Passage, npt.NDArray[Any], Position]]

    def write_next(self) -> bool:
        """Write the next part that does not exist yet, and return True; takes until the part is
        written. If no text is left, write the file that records the stream's end (END_FILE), and
        return False; so does each later call.

        Raises ConfigError for an empty text or one that cannot be encoded, CorruptError for a
        damaged file, StorageError if reading or writing fails or a file has changed.
        """
        if n_parts_of(self._folder) is not None:
            return False
        number = self._next or 0
        while part_header(self._folder, number).exists():
            number += 1
        if self._next != number:
            self._begin(number)
        self._next = None
        try:
            with building(part_header(self._folder, number).parent) as unfinished:
                self._write(number, unfinished)
            self._next = number + 1
        except FolderExistsError:
            pass  # another run on the same text has written it meanwhile
        except _NothingLeftError:
            if number == 0:
                name = self._origin.text.name
                raise ConfigError(
                    f"the text {name!r} is empty; there is nothing to learn from"
                ) from None
            write_atomic(self._folder / END_FILE, json.dumps({"parts": number}).encode())
            return False
        return True

    def _begin(self, number: int) -> None:
        """Prepare to write part `number`: set `_encoded` and `_written`, so that tokenizing goes on
        where the part before it ended, as its header records."""
        if number:
            header = part_header(self._folder, number - 1)
            tokenizer = load_tokenizer(header.parent / TOKENIZER_FILE)
            start = Position(**read_json(header)["text"]["end"])
        else:
            tokenizer, start = self._first_tokenizer(), Position()
        self._written = PassageWriter(tokenizer, start.is_starting, start.has_tokens)
        self._encoded = self._encode(tokenizer, start)

    def _first_tokenizer(self) -> Tokenizer:
        """Return the stream's tokenizer; if it is a setting, train it on the first LEARNED_BYTES of
        the training split."""
        setting = self._origin.tokenizer
        if isinstance(setting, Tokenizer):
            return setting

        def beginning() -> Iterator[str]:
            n_bytes = 0
            for passage, _ in self._passages(Position(), setting.partition(":")[0]):
                if passage.split == "train" and passage.text:
                    yield passage.text
                    n_bytes += utf8_size(passage.text)
                if n_bytes >= LEARNED_BYTES:
                    return

        return build_tokenizer(setting, beginning)

    def _passages(self, start: Position, kind: str) -> Iterator[tuple[Passage, Position]]:
        """Yield the passages from `start` on, each with the position after it; `kind` is the
        tokenizer kind, which decides how text is cut. Raises StorageError for a file that has
        changed."""
        text, bytes_before = self._origin.text, start.bytes_before
        for number, (split, file) in enumerate(self._origin.files):
            if number < start.file:
                continue
            if text.max_bytes is not None and bytes_before >= text.max_bytes:
                return
            if _known_by(file) != self._origin.keys[number]:
                raise StorageError(f"{file} changed while the run read it; start again")
            documents = file.documents(text.contents)
            if split == "train" and text.max_bytes is not None:
                documents = first_bytes(documents, text.max_bytes - bytes_before)
            passages = split_passages(documents, WHOLE, Chunker(kind))
            if split == "train":
                passages = self._with_splits(passages, bytes_before)
            n_bytes = 0
            for n, passage in enumerate(passages, start=1):
                n_bytes += utf8_size(passage.text)
                if number > start.file or n > start.n_passages:
                    placed = passage if split == "train" else passage._replace(split=split)
                    yield placed, Position(number, n, bytes_before)
            bytes_before += n_bytes if split == "train" else 0

    def _with_splits(self, passages: Iterator[Passage], n_bytes: int) -> Iterator[Passage]:
        """Yield the text's passages, each with its split set: the text's beginning is val, what
        follows is test, the rest train. A passage that reaches over a split's end may be cut in
        two.

        A held-out split has its fraction of the text, or up to MOST_OVER more, and at most
        MOST_HELD_OUT_BYTES. It gets nothing here if it is a separate text. n_bytes: UTF-8 bytes of
        the text before the first passage.
        """
        text, splitting = self._origin.text, self._origin.splitting
        fractions = (splitting.validation_fraction, splitting.test_fraction)
        sizes = [min(int(each * text.n_bytes), MOST_HELD_OUT_BYTES) for each in fractions]
        val, held_out = (0, 0) if text.held_out else (sizes[0], sum(sizes))
        # A power of two: it stays as it is when the text changes a little.
        grain = 1 << max(0, int(text.n_bytes * MOST_OVER).bit_length() - 1)
        split = ""
        for whole in passages:
            for passage in _cut(whole, n_bytes, (val, held_out), grain):
                before = split
                if passage.text or not split:  # an empty one only ends its document
                    split = "val" if n_bytes < val else "test" if n_bytes < held_out else "train"
                yield passage._replace(split=split, starts=passage.starts or split != before)
                n_bytes += utf8_size(passage.text)

    def _encode(
        self, tokenizer: Tokenizer, start: Position
    ) -> Iterator[tuple[Passage, npt.NDArray[Any], Position]]:
        """Yield the passages from `start` on, each with its ids (n_tokens,) and the position after
        it."""
        ahead: deque[Position] = deque()  # of passages that wait to be encoded

        def passages() -> Iterator[Passage]:
            for passage, position in self._passages(start, tokenizer.kind):
                ahead.append(position)
                yield passage

        size = self._origin.text.n_bytes
        try:
            for batch, ids in encoded_passages(passages(), tokenizer, size):
                for passage, each in zip(batch, ids, strict=True):
                    yield passage, each, ahead.popleft()
        except UnseenCharacterError as error:
            _, file = self._origin.files[ahead[0].file]
            where = f"passage {ahead[0].n_passages - 1} of {file}"
            raise UnseenCharacterError(error.character, error.position, where) from error

    def _write(self, number: int, folder: Path) -> None:
        """Write part `number` as shards into `folder`, until it has `first_tokens` · 2^number
        training tokens (at most LARGEST_TOKENS) or the text ends. Raises _NothingLeftError if the
        text has no more tokens."""
        written, origin = self._written, self._origin
        goes_on = number > 0 and not written.is_starting  # the document of the part before
        limit = min(origin.first_tokens << number, LARGEST_TOKENS)
        with ShardWriter(folder, PART_NAME, written.tokenizer) as writer:
            for passage, ids, position in self._encoded:
                if not writer.n_tokens:
                    goes_on &= not passage.starts
                    written.is_starting |= goes_on  # each split of shards begins with a document
                written.write(writer, passage, ids)
                after = position
                if writer.n_tokens_in("train") >= limit:
                    break
            if not writer.n_tokens:
                raise _NothingLeftError
            state = {"is_starting": written.is_starting, "has_tokens": written.has_tokens}
            end = asdict(replace(after, **state))
            writer.finish({"stream": self._hash, "continues": goes_on, "end": end})


def _cut(passage: Passage, start: int, ends: Sequence[int], grain: int) -> Iterator[Passage]:
    """Yield a passage, cut in two wherever it reaches beyond one of `ends` by more than `grain`: at
    the next multiple of `grain`, or the end of a word soon after. `start`, where the passage
    begins, `ends` and `grain` count UTF-8 bytes of the whole text."""
    for end in ends:
        if end <= start or start + utf8_size(passage.text) - end <= grain:
            continue
        n_bytes = -(-end // grain) * grain - start
        n = len(passage.text.encode()[:n_bytes].decode(errors="ignore")) + 1
        text = next(chunks(passage.text[: n + WORD_CHARACTERS], n))
        start += utf8_size(text)
        yield passage._replace(text=text, ends=False)
        passage = passage._replace(text=passage.text[len(text) :], starts=False)
    yield passage


def preparer() -> Callable[[tuple[Origin, Path] | None], bool]:
    """Return the function that a background process serves (`PythonChild`). Each call writes one
    part of a token stream and returns True; False once the text has ended. The first call is given
    the stream's (origin, folder), later ones None. Also raises this process's niceness by
    NICENESS."""
    os.nice(NICENESS)
    parts: list[Parts] = []

    def write_next(request: tuple[Origin, Path] | None) -> bool:
        if request is not None:
            parts[:] = [Parts(*request)]
        return parts[0].write_next()

    return write_next
