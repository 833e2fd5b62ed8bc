"""A corpus's contents (hash, sizes), found in a first pass, and its shards, written in a second."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from pentameter.data.progress import AWAITING, ENCODING, TRAINING, Progress, no_progress
from pentameter.data.shards.writer import ShardWriter
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chat import ChatTemplate
from pentameter.data.tokenizers.setting import build_tokenizer
from pentameter.disk.atomic import FolderExistsError
from pentameter.disk.lock import building


@dataclass(frozen=True, kw_only=True)
class Contents(ABC):
    """Hash, sizes and distinct characters of a corpus, and the same for corpora held out as other
    splits."""

    kind: ClassVar[str]
    """The kind of corpus: `text` or `conversations`."""
    has_loss_mask: ClassVar[bool] = False
    """True if only some tokens are learned, as in conversations."""

    name: str
    """Stem of the shards' file names."""
    sha256: str
    """sha256, in hex, of everything that decides the tokens for a given tokenizer."""
    n_bytes: int
    """UTF-8 bytes of the corpus's text, without held-out corpora."""
    characters: str = ""
    """Distinct characters as a sorted string, held-out corpora included; empty if not collected."""
    held_out: Mapping[str, Self] = field(default_factory=dict)
    """Contents by split, `val` and `test`, if these are separate corpora."""

    @property
    def parts(self) -> list[Self]:
        """This corpus's contents, then those of held-out corpora."""
        return [self, *self.held_out.values()]

    @property
    def chat(self) -> ChatTemplate | None:
        """Chat template to store with the tokenizer; None leaves the tokenizer's own."""
        return None

    @property
    def key(self) -> dict[str, Any]:
        """JSON values that identify the corpus in a cache."""
        held_out = {split: part.sha256 for split, part in self.held_out.items()}
        return {"name": self.name, self.kind: self.sha256, "held_out": held_out}

    @abstractmethod
    def count(self) -> dict[str, int]:
        """Return the corpus's size in its own unit: {"characters": …} or {"conversations": …}."""

    def description(self) -> dict[str, Any]:
        """Return hashes and sizes as JSON values, for the shards' header."""
        sizes = {"sha256": self.sha256, "bytes": self.n_bytes, **self.count()}
        held_out = {split: part.description() for split, part in self.held_out.items()}
        return {**sizes, **({"held_out": held_out} if held_out else {})}

    @abstractmethod
    def train_texts(self, tokenizer: str) -> Iterator[tuple[str, int]]:
        """Yield the corpus's text in passages cut for a tokenizer setting, empty outside the train
        split, each with the UTF-8 bytes read so far."""

    @abstractmethod
    def encode(self, tokenizer: Tokenizer, writer: ShardWriter) -> Iterator[int]:
        """Write the tokens of all `parts`; yield the UTF-8 bytes of text done so far.

        Raises StorageError if a corpus has changed since the first pass.
        """


def prepare_contents(
    contents: Contents,
    folder: Path,
    tokenizer: str | Tokenizer,
    *,
    progress: Progress = no_progress,
    count_tokens: Callable[[int], None] | None = None,
    warnings: list[str] | None = None,
    keep_existing: bool = False,
) -> None:
    """Write a corpus's shards into a new folder, which appears whole or not at all.

    `tokenizer` is a tokenizer, or a setting that makes one from the text: `char` knows every
    character in all splits, `word` and `bpe:N` are trained on the train split. `count_tokens` is
    called with the tokens written so far; `warnings` collects sentences for the user. One process
    at a time prepares a folder, others wait; with `keep_existing`, a folder that has appeared
    meanwhile is kept.

    Raises ConfigError (character outside the vocabulary, folder exists), StorageError (reading or
    writing fails, or the corpus changed between the passes).
    """
    n_bytes = sum(part.n_bytes for part in contents.parts)
    kept = [FolderExistsError] if keep_existing else []
    with suppress(*kept), building(folder, lambda: progress(AWAITING, 0, n_bytes)) as unfinished:
        used = _tokenizer(tokenizer, contents, progress, warnings)
        used.chat = contents.chat or used.chat
        with ShardWriter(
            unfinished, contents.name, used, has_loss_mask=contents.has_loss_mask
        ) as writer:
            for n_done in contents.encode(used, writer):
                progress(ENCODING, n_done, n_bytes)
                if count_tokens is not None:
                    count_tokens(writer.n_tokens)
            writer.finish(contents.description())


def _tokenizer(
    setting: str | Tokenizer, contents: Contents, progress: Progress, warnings: list[str] | None
) -> Tokenizer:
    """Return `setting` if it is a tokenizer; otherwise train the one it names on the train split
    (`char`: on all characters)."""

    def train_texts() -> Iterator[str]:
        for text, n_done in contents.train_texts(str(setting)):
            progress(TRAINING, n_done, contents.n_bytes)
            if text:
                yield text

    if not isinstance(setting, str):
        return setting
    if setting == "char":
        return CharTokenizer(contents.characters)
    return build_tokenizer(setting, train_texts, warnings=warnings)
