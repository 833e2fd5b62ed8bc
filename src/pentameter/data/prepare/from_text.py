"""Text into token shards: two passes over a text of any size, the second on all cores.

The first pass (`first_pass.py`) finds what the text is; the second encodes it (`encoders.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.data.corpora.text import Text, utf8_size
from pentameter.data.prepare.encoders import BATCH_CHARACTERS, batches, encoded, processes_for
from pentameter.data.prepare.first_pass import Contents, TextDigest, read_contents
from pentameter.data.prepare.splits import Passage, Splitting, divide
from pentameter.data.progress import AWAITING, ENCODING, TRAINING, Progress
from pentameter.data.shards.writer import SHARD_TOKENS, ShardWriter
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.char import CharTokenizer, UnseenCharacterError
from pentameter.data.tokenizers.cutting import Cutter
from pentameter.data.tokenizers.setting import build_tokenizer, chosen_tokenizer
from pentameter.disk.atomic import refuse_existing
from pentameter.disk.cache import building_alone
from pentameter.errors import StorageError


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
    tokenizer = chosen_tokenizer(tokenizer)
    if not keep_existing:
        refuse_existing(folder)
    if contents is None:
        contents = read_contents(text, splitting, characters=tokenizer == "char", progress=progress)
    work = _SecondPass(text, contents, progress, count_tokens)
    with building_alone(
        folder, keep_existing=keep_existing, waiting=work.await_another
    ) as unfinished:
        if unfinished is None:
            return
        used = work.tokenizer(tokenizer, warnings)
        n_processes = processes_for(used, work.n_bytes) if n_processes is None else n_processes
        with ShardWriter(unfinished, text.name, used, shard_tokens) as writer:
            work.encode(used, writer, n_processes)
            writer.finish(work.description())


class _SecondPass:
    """The second pass over a text and the texts held out beside it: encodes and writes them."""

    def __init__(
        self,
        text: Text,
        contents: Contents,
        progress: Progress | None,
        count_tokens: Callable[[int], None] | None,
    ) -> None:
        self._contents = contents
        self._progress = progress or (lambda stage, done, total: None)
        self._count_tokens = count_tokens or (lambda n: None)
        self._texts = [(text, contents)]
        self._texts += [(other, contents.held_out[s]) for s, other in text.held_out.items()]
        self.n_bytes = sum(part.n_bytes for _, part in self._texts)

    def description(self) -> dict[str, Any]:
        """The hashes and sizes of what was read, for the header."""
        described = [
            {"sha256": part.sha256, "bytes": part.n_bytes, "characters": part.n_characters}
            for _, part in self._texts
        ]
        held_out = dict(zip(self._contents.held_out, described[1:], strict=True))
        return {**described[0], **({"held_out": held_out} if held_out else {})}

    def await_another(self) -> None:
        """Tell that another process prepares the same folder."""
        self._progress(AWAITING, 0, self.n_bytes)

    def tokenizer(self, wanted: str | Tokenizer, warnings: list[str] | None) -> Tokenizer:
        """The tokenizer itself, or the one that the setting makes of the train split."""
        if not isinstance(wanted, str):
            return wanted
        if wanted == "char":
            return CharTokenizer(self._contents.characters)
        return build_tokenizer(wanted, lambda: self._train_texts(wanted), warnings=warnings)

    def encode(self, tokenizer: Tokenizer, writer: ShardWriter, n_processes: int) -> None:
        """Write all tokens; StorageError if the text is not that of the first pass."""
        digests = [TextDigest() for _ in self._texts]
        passages = self._passages(tokenizer.kind, digests)
        documents = _DocumentWriter(writer, tokenizer.end_of_text)
        # A passage alone where a character may be unknown, so that its place is known.
        size = 1 if tokenizer.kind == "char" else BATCH_CHARACTERS
        try:
            for batch, ids in encoded(batches(passages, size), tokenizer, n_processes):
                for passage, passage_ids in zip(batch, ids, strict=True):
                    documents.write(passage, passage_ids)
                self._progress(ENCODING, documents.n_bytes, self.n_bytes)
                self._count_tokens(writer.n_tokens)
        except UnseenCharacterError as error:
            raise self._placed(error, documents.n_characters) from error
        for digest, (text, contents) in zip(digests, self._texts, strict=True):
            if digest.hexdigest() != contents.sha256:
                raise StorageError(f"the text {text.name!r} changed while it was read; start again")

    def _passages(self, kind: str, digests: list[TextDigest]) -> Iterator[Passage]:
        for digest, (text, contents) in zip(digests, self._texts, strict=True):
            yield from divide(digest.of(text.documents()), contents.division, Cutter(kind))

    def _train_texts(self, kind: str) -> Iterator[str]:
        n_bytes = 0
        for passage in self._passages(kind, [TextDigest() for _ in self._texts]):
            n_bytes += utf8_size(passage.text)
            if passage.split == "train" and passage.text:
                yield passage.text
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


class _DocumentWriter:
    """Writes the ids of passages as documents, each followed by the end of text if there is one."""

    def __init__(self, writer: ShardWriter, end_of_text: int | None) -> None:
        self._writer, self._end_of_text = writer, end_of_text
        self.n_characters = self.n_bytes = 0
        self._is_starting = False  # the document at hand has no token yet in the split at hand
        self._has_tokens = False  # it has one in some split

    def write(self, passage: Passage, ids: npt.NDArray[Any]) -> None:
        """Append the ids (n_tokens,) of the passage that follows."""
        n_bytes = utf8_size(passage.text)
        self._is_starting |= passage.starts
        if len(ids):
            if self._is_starting:
                self._writer.start_document(passage.split)
            self._is_starting, self._has_tokens = False, True
            self._writer.write(passage.split, ids, n_bytes)
        if passage.ends:
            if self._has_tokens and self._end_of_text is not None:
                self._writer.write(passage.split, np.array([self._end_of_text]), 0)
            self._is_starting = self._has_tokens = False
        self.n_characters += len(passage.text)
        self.n_bytes += n_bytes
