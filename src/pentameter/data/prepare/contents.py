"""Contents of a corpus, found in a first pass, and their shards, written in a second."""

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
    """Hash, sizes and distinct characters, and the same for corpora held out as other splits."""

    kind: ClassVar[str]
    """`text` or `conversations`."""
    has_loss_mask: ClassVar[bool] = False
    """True if some tokens only are to be learned."""

    name: str
    """Stem of the shards' file names."""
    sha256: str
    """sha256, in hex, of everything that decides the tokens for a given tokenizer."""
    n_bytes: int
    """UTF-8 bytes of text."""
    characters: str = ""
    """Distinct characters, sorted, held-out corpora included; empty if not asked for."""
    held_out: Mapping[str, Self] = field(default_factory=dict)
    """`val` and `test`, if they are corpora themselves."""

    @property
    def parts(self) -> list[Self]:
        """The corpus, then those held out."""
        return [self, *self.held_out.values()]

    @property
    def chat(self) -> ChatTemplate | None:
        """Chat template to store with the tokenizer; None leaves the tokenizer's own."""
        return None

    @property
    def key(self) -> dict[str, Any]:
        """JSON values by which a cache knows the corpus."""
        held_out = {split: part.sha256 for split, part in self.held_out.items()}
        return {"name": self.name, self.kind: self.sha256, "held_out": held_out}

    @abstractmethod
    def count(self) -> dict[str, int]:
        """Return the corpus's size in its own unit, by the unit's name."""

    def description(self) -> dict[str, Any]:
        """Return hashes and sizes for the shards' header."""
        sizes = {"sha256": self.sha256, "bytes": self.n_bytes, **self.count()}
        held_out = {split: part.description() for split, part in self.held_out.items()}
        return {**sizes, **({"held_out": held_out} if held_out else {})}

    @abstractmethod
    def train_texts(self, tokenizer: str) -> Iterator[tuple[str, int]]:
        """Yield the train split's text in passages, cut for a tokenizer setting, each with the
        bytes read so far."""

    @abstractmethod
    def encode(self, tokenizer: Tokenizer, writer: ShardWriter) -> Iterator[int]:
        """Write all parts' tokens; yield the bytes of text done so far.

        Raises StorageError if a corpus is not as the first pass found it.
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
    """Write shards as a new folder, which appears whole or not at all.

    `tokenizer`, unless it is one, is a setting that the text decides: `char` knows every character
    in all splits, `word` and `bpe:N` are trained on the train split. `count_tokens` is told the
    tokens written so far; `warnings` collects sentences for the user. One process at a time
    prepares a folder, others wait; with `keep_existing`, a folder that has appeared meanwhile is
    kept.

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
    """Return a tokenizer as it is, or train the one that a setting names on the train split."""

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
