"""Text into token shards: two passes over a text of any size, the second in parallel.

The first pass (`contents.py`) finds what the text is; the second encodes it. From
time to time the second notes how far it came, so that a preparation that was killed goes on there
when the same is asked for again; the text is read again, but not encoded again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.data.corpora.text import Text, utf8_size
from pentameter.data.prepare.contents import Contents, Splitting, TextDigest, read_contents
from pentameter.data.prepare.documents import Cutter, Part, divide
from pentameter.data.prepare.encoding import BATCH_CHARACTERS, batches, encoded, processes_for
from pentameter.data.prepare.progress import AWAITING, ENCODING, RESUMING, TRAINING, Progress
from pentameter.data.shards.shards import TOKENIZER_FILE
from pentameter.data.shards.writer import JOURNAL, SHARD_TOKENS, ShardWriter
from pentameter.data.tokenizers.building import (
    build_tokenizer,
    check_tokenizer_setting,
    is_made_from_text,
)
from pentameter.data.tokenizers.char import CharTokenizer, UnseenCharacterError
from pentameter.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pentameter.disk.storage import continuing, refuse_existing
from pentameter.errors import ConfigError, CorruptError, StorageError

NOTE_SECONDS = 30.0  # a killed preparation loses the encoding of about as long
UNFINISHED_VERSION = 1  # raise it when what an older version left could not be continued


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
    note_seconds: float = NOTE_SECONDS,
    n_processes: int | None = None,
    keep_existing: bool = False,
) -> None:
    """Write the shards of a text as a new folder, which appears whole or not at all.

    `tokenizer` is a setting of `data.tokenizer`, or a tokenizer: `char` knows every character of
    the whole text, `word` and `bpe:N` are made from the train split. `contents` spares the first
    pass if it is known. `count_tokens` is told the tokens written so far; `warnings` takes what
    the user should know. `n_processes` encode (0: this one); by default as many as pay. With
    `keep_existing`, a folder that has appeared meanwhile is kept.

    Killed and called again, it goes on; see `pentameter.disk.storage.continuing`.

    Raises ConfigError (tokenizer unknown, character outside its vocabulary, folder exists, empty
    text), CorruptError (not UTF-8 text), StorageError (reading or writing fails, or the text
    changes between the passes).
    """
    tokenizer = chosen_tokenizer(tokenizer)
    if not keep_existing:
        refuse_existing(folder)
    if contents is None:
        contents = read_contents(text, splitting, characters=tokenizer == "char", progress=progress)
    work = _Work(text, contents, progress, count_tokens)
    key = work.key(tokenizer, shard_tokens)
    with continuing(
        folder, key, JOURNAL, keep_existing=keep_existing, waiting=work.await_another
    ) as unfinished:
        if unfinished is None:
            return
        try:
            used = work.tokenizer(tokenizer, unfinished / TOKENIZER_FILE, warnings)
            n = processes_for(used, work.n_bytes) if n_processes is None else n_processes
            with ShardWriter(unfinished, text.name, used, shard_tokens) as writer:
                if used is not tokenizer and used.kind != "char":
                    writer.note(writer.noted)  # making it may have taken long
                work.encode(used, writer, note_seconds, n)
                writer.finish(work.description())
        except (ConfigError, CorruptError, ChangedTextError):
            (unfinished / JOURNAL).unlink(missing_ok=True)  # trying again would not help
            raise


def chosen_tokenizer(setting: str | Tokenizer) -> str | Tokenizer:
    """The tokenizer of a setting, or the setting itself where the text must decide.

    Raises ConfigError for a setting that no text could make, or a missing file.
    """
    if not isinstance(setting, str):
        return setting
    check_tokenizer_setting(setting)
    if is_made_from_text(setting):
        return setting
    return build_tokenizer(setting, lambda: iter(()))


class ChangedTextError(StorageError):
    """The second pass did not read what the first one had."""


@dataclass
class _Done:
    """How far the second pass came."""

    parts: int = 0
    characters: int = 0
    bytes: int = 0
    starting: bool = False
    """The document at hand has no token yet in the split at hand."""
    filled: bool = False
    """It has a token in some split."""


class _Work:
    """One preparation: a text with what is held out beside it, as the first pass found them."""

    def __init__(
        self,
        text: Text,
        contents: Contents,
        progress: Progress | None,
        count_tokens: Callable[[int], None] | None,
    ) -> None:
        self._contents, self._name = contents, text.name
        self._progress = progress or (lambda stage, done, total: None)
        self._count_tokens = count_tokens or (lambda n: None)
        self._texts = [(text, contents)]
        self._texts += [(other, contents.held_out[s]) for s, other in text.held_out.items()]
        self.n_bytes = sum(part.n_bytes for _, part in self._texts)

    def key(self, tokenizer: str | Tokenizer, shard_tokens: int) -> str:
        """What decides the result, as a name: text, splits, tokenizer, size of the files."""
        settings = [
            UNFINISHED_VERSION,
            self._name,
            [(part.sha256, part.routes.fingerprint()) for _, part in self._texts],
            tokenizer if isinstance(tokenizer, str) else tokenizer.hash,
            shard_tokens,
        ]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]

    def description(self) -> dict[str, Any]:
        """What was read, for the header."""
        described = [
            {"sha256": part.sha256, "bytes": part.n_bytes, "characters": part.n_characters}
            for _, part in self._texts
        ]
        held_out = dict(zip(self._contents.held_out, described[1:], strict=True))
        return {**described[0], **({"held_out": held_out} if held_out else {})}

    def await_another(self) -> None:
        """Tell that another process prepares the same folder."""
        self._progress(AWAITING, 0, self.n_bytes)

    def tokenizer(
        self, wanted: str | Tokenizer, earlier: Path, warnings: list[str] | None
    ) -> Tokenizer:
        """The tokenizer, made from the train split if need be, or found where it was made."""
        if not isinstance(wanted, str):
            return wanted
        if wanted == "char":
            return CharTokenizer(self._contents.characters)
        if earlier.exists():
            with suppress(CorruptError):  # a power loss may have damaged it
                return load_tokenizer(earlier)
        made = build_tokenizer(wanted, lambda: self._train_texts(wanted), warnings=warnings)
        made.save(earlier)
        return made

    def encode(
        self, tokenizer: Tokenizer, writer: ShardWriter, note_seconds: float, n_processes: int
    ) -> None:
        """Write all tokens that are not written yet; ChangedTextError if the text is another."""
        digests = [TextDigest() for _ in self._texts]
        parts = self._parts(tokenizer.kind, digests)
        done = _Done(**writer.noted)
        n_bytes = 0
        for part in islice(parts, done.parts):  # read again only for the hash
            n_bytes += utf8_size(part.text)
            self._progress(RESUMING, n_bytes, done.bytes)
        # A part alone where a character may be unknown, so that its place is known.
        size = 1 if tokenizer.kind == "char" else BATCH_CHARACTERS
        noted = time.monotonic()
        try:
            for batch, ids in encoded(batches(parts, size), tokenizer, n_processes):
                for part, part_ids in zip(batch, ids, strict=True):
                    _write(part, part_ids, tokenizer.end_of_text, writer, done)
                self._progress(ENCODING, done.bytes, self.n_bytes)
                self._count_tokens(writer.n_tokens)
                if time.monotonic() - noted >= note_seconds:
                    writer.note(asdict(done))
                    noted = time.monotonic()
        except UnseenCharacterError as error:
            raise self._placed(error, done.characters) from error
        for digest, (text, contents) in zip(digests, self._texts, strict=True):
            if digest.hexdigest() != contents.sha256:
                raise ChangedTextError(
                    f"the text {text.name!r} changed while it was read; start again"
                )

    def _parts(self, kind: str, digests: list[TextDigest]) -> Iterator[Part]:
        for digest, (text, contents) in zip(digests, self._texts, strict=True):
            yield from divide(digest.of(text.documents()), contents.routes, Cutter(kind))

    def _train_texts(self, kind: str) -> Iterator[str]:
        n_bytes = 0
        for part in self._parts(kind, [TextDigest() for _ in self._texts]):
            n_bytes += utf8_size(part.text)
            if part.split == "train" and part.text:
                yield part.text
            self._progress(TRAINING, n_bytes, self.n_bytes)

    def _placed(self, error: UnseenCharacterError, position: int) -> UnseenCharacterError:
        """The same error with its place in the text that has the character."""
        texts = iter(self._texts)
        text, contents = next(texts)
        while position >= contents.n_characters:
            position -= contents.n_characters
            text, contents = next(texts)
        return UnseenCharacterError(
            error.character, position + error.position, f"the text {text.name!r}"
        )


def _write(
    part: Part,
    ids: npt.NDArray[Any],
    end_of_text: int | None,
    writer: ShardWriter,
    done: _Done,
) -> None:
    n_bytes = utf8_size(part.text)
    done.starting |= part.starts
    if len(ids):
        if done.starting:
            writer.start_document(part.split)
        done.starting, done.filled = False, True
        writer.write(part.split, ids, n_bytes)
    if part.ends:
        if done.filled and end_of_text is not None:
            writer.write(part.split, np.array([end_of_text]), 0)
        done.starting = done.filled = False
    done.parts += 1
    done.characters += len(part.text)
    done.bytes += n_bytes
