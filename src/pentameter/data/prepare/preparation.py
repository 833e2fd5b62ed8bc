"""A corpus on its way to token shards: a first pass over it finds its contents (hash, sizes,
splits), a second writes the shards, into a folder that the user names or into the cache.

The cache is keyed by the corpus's sha256 and the settings that decide its tokens, so a changed file
is never mistaken for the old one, at the price of reading the corpus once per start.

`from_text.py` and `from_conversations.py` have the passes over both kinds, `background.py` opens a
text that is encoded while a run reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from pentameter.data.corpora.text import Corpus
from pentameter.data.prepare.splits import Splitting
from pentameter.data.progress import AWAITING, ENCODING, MERGING, TRAINING, Progress, no_progress
from pentameter.data.shards.dataset import Dataset
from pentameter.data.shards.format import ENCODED_WHOLE, TOKENIZER_FILE
from pentameter.data.shards.opening import open_shards
from pentameter.data.shards.writer import ShardWriter
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.bpe import END_OF_TEXT
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chat import ChatTemplate
from pentameter.data.tokenizers.setting import (
    bpe_vocab_size,
    build_tokenizer,
    is_made_from_text,
    load_tokenizer,
)
from pentameter.disk.atomic import FolderExistsError, sha256_of_json
from pentameter.disk.cache import cache_folder
from pentameter.disk.lock import building
from pentameter.errors import ConfigError, CorruptError

CACHE_VERSION = 2  # raise it when prepared data must change for the same text and settings


@dataclass(frozen=True, kw_only=True)
class Contents(ABC):
    """The results of the first pass over a corpus: its hash, its sizes and its distinct characters;
    and the same for corpora held out as validation or test."""

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
    own_characters: str
    """Distinct characters in the corpus's text, in any order; empty if not collected."""
    chat: ChatTemplate | None = None
    """Chat template to store with the tokenizer; None leaves the tokenizer's own."""
    remarks: Sequence[str] = ()
    """Sentences for the user about the corpus, such as what a chat template leaves out of it."""
    held_out: Mapping[str, Self] = field(default_factory=dict)
    """Contents by split, `val` and `test`, if these are separate corpora."""

    @property
    def parts(self) -> list[Self]:
        """This corpus's contents, then those of held-out corpora."""
        return [self, *self.held_out.values()]

    @property
    def characters(self) -> str:
        """Distinct characters as a sorted string, held-out corpora included; empty if not
        collected."""
        return "".join(sorted(set().union(*(part.own_characters for part in self.parts))))

    @property
    def key(self) -> dict[str, Any]:
        """JSON values that identify the corpus in a cache."""
        held_out = {split: part.sha256 for split, part in self.held_out.items()}
        return {"name": self.name, self.kind: self.sha256, "held_out": held_out}

    @abstractmethod
    def count(self) -> dict[str, int]:
        """Return the corpus's size as a dict with one entry, whose key names the unit:
        {"characters": n} for text, {"conversations": n} for conversations."""

    def description(self) -> dict[str, Any]:
        """Return hashes and sizes as JSON values, for the shards' header."""
        sizes = {"sha256": self.sha256, "bytes": self.n_bytes, **self.count()}
        held_out = {split: part.description() for split, part in self.held_out.items()}
        return {**sizes, **({"held_out": held_out} if held_out else {})}

    @abstractmethod
    def train_texts(self, tokenizer: str) -> Iterator[tuple[str, int]]:
        """Yield the corpus's text in passages cut for the tokenizer setting (`bpe:8192`), each with
        the UTF-8 bytes read so far. A passage outside the train split is yielded as an empty
        string."""

    @abstractmethod
    def encode(self, tokenizer: Tokenizer, writer: ShardWriter) -> Iterator[int]:
        """Write the tokens of all `parts` through `writer`, each to its split; yield the UTF-8
        bytes of text done so far.

        Raises StorageError if a corpus has changed since the first pass.
        """


@dataclass(frozen=True)
class Preparation(ABC):
    """A corpus on its way to token shards: the corpus, the tokenizer that encodes it and the rule
    that splits it, which together determine the shards."""

    corpus: Corpus
    tokenizer: str | Tokenizer
    """A tokenizer, or a setting that makes one from the corpus: `char` knows every character in all
    splits, `word` and `bpe:N` are trained on the train split."""
    splitting: Splitting
    """Fractions for the splits; unused if corpora are held out beside this one."""
    progress: Progress = no_progress
    """Called with a pass's name, the bytes done and an estimate of all bytes."""
    special_texts: Sequence[str] = (END_OF_TEXT,)
    """Texts of the special tokens that the tokenizer has, or gets if it is made from the corpus."""
    kept: Collection[str] = field(default=(), kw_only=True)
    """Names of folders in the cache that a resumed run has read. They are opened again even if an
    earlier version wrote them, which encoded otherwise."""

    @cached_property
    def contents(self) -> Contents:
        """The results of a pass over the corpus, and over those held out beside it: hashes, sizes
        and splits. Each is read once, at the first access. Raises ConfigError if one is empty,
        CorruptError for a damaged file, StorageError if reading fails."""
        held_out, whole = self.corpus.held_out, Splitting(0.0)
        found = self._read(self.corpus, "train", whole if held_out else self.splitting)
        parts = {split: self._read(corpus, split, whole) for split, corpus in held_out.items()}
        return replace(found, held_out=parts)

    @property
    def remarks(self) -> Sequence[str]:
        """Sentences for the user about the corpus and those held out, which must have been read;
        see `Contents.remarks`."""
        return [sentence for part in self.contents.parts for sentence in part.remarks]

    @property
    def holds(self) -> str:
        """The corpus in words ("52,002 conversations, Alpaca's form"); "" for text."""
        return ""

    @abstractmethod
    def _read(self, corpus: Any, split: str, splitting: Splitting) -> Contents:
        """Make the first pass over one corpus, and return its contents. `split` is `train` for the
        corpus itself, which is split by `splitting`; `val` or `test` for a held-out corpus, all of
        which belongs to that split."""

    @property
    def key(self) -> dict[str, Any]:
        """JSON values that identify the corpus in the cache, its `name` among them."""
        return self.contents.key

    def write_shards(
        self,
        folder: Path,
        *,
        warnings: list[str],
        count_tokens: Callable[[int], None] | None = None,
    ) -> None:
        """Write the shards into a new `folder`, which is renamed into place once it is complete.
        One process at a time prepares a folder, others wait.

        `count_tokens` is called after each batch with the tokens written so far, in all splits;
        `warnings` collects sentences for the user. Raises FolderExistsError if the folder exists or
        has appeared meanwhile, ConfigError for a character outside the vocabulary and a corpus
        without a token, StorageError if reading or writing fails, or the corpus changed between the
        passes.
        """
        contents = self.contents
        n_bytes = sum(part.n_bytes for part in contents.parts)
        with building(folder, lambda: self.progress(AWAITING, 0, n_bytes)) as unfinished:
            tokenizer = self._made_tokenizer(warnings)
            tokenizer.chat = contents.chat or tokenizer.chat
            masked = contents.has_loss_mask
            with ShardWriter(unfinished, contents.name, tokenizer, has_loss_mask=masked) as writer:
                for n_done in contents.encode(tokenizer, writer):
                    self.progress(ENCODING, n_done, n_bytes)
                    if count_tokens is not None:
                        count_tokens(writer.n_tokens)
                if not writer.n_tokens:
                    raise ConfigError(
                        f"the tokenizer makes no token of {contents.name!r}: there is nothing in "
                        "it that it knows; name another text, or another tokenizer"
                    )
                writer.finish(contents.description())

    def _made_tokenizer(self, warnings: list[str]) -> Tokenizer:
        """Return the tokenizer. If `tokenizer` is a setting, it is loaded, or made from the
        corpus's text (`char`, `word`, `bpe:N`); `warnings` gets sentences on its training."""
        setting, contents = self.tokenizer, self.contents
        if isinstance(setting, Tokenizer):
            return setting
        if setting == "char":
            return CharTokenizer(contents.characters)

        def train_texts() -> Iterator[str]:
            for text, n_done in contents.train_texts(setting):
                self.progress(TRAINING, n_done, contents.n_bytes)
                if text:
                    yield text
            if bpe_vocab_size(setting):
                self.progress(MERGING, 0, contents.n_bytes)

        special = self.special_texts
        return build_tokenizer(setting, train_texts, special_texts=special, warnings=warnings)

    def open_cached(self, setting: str, *, verify: bool, warnings: list[str]) -> Dataset:
        """Open the shards of this corpus in the cache; write them first if they are not there.

        setting: the value of `data.tokenizer`. If `tokenizer` is a trained model's and equals the
            one that this setting made from the corpus, the shards that the model was trained on are
            opened.
        verify: whether to check the files against their hashes.
        warnings: collects sentences for the user.

        Raises CorruptError for damage, ConfigError for an empty corpus or a character outside the
        vocabulary, StorageError if reading or writing fails.
        """
        folder = self._cached_folder(setting)
        header = folder / f"{self.corpus.name}.json"
        if not header.exists():
            with suppress(FolderExistsError):  # another process has written it meanwhile
                self.write_shards(folder, warnings=warnings)
        try:
            return open_shards(header, verify=verify, progress=self.progress)
        except CorruptError as error:
            raise CorruptError(
                f"{error} (it is a cache: delete {folder} and start again)"
            ) from error

    def _cached_folder(self, setting: str) -> Path:
        """Return the folder for the shards in the cache, whether or not it exists.

        If `tokenizer` is a trained model's, it may equal the one that `setting` (`data.tokenizer`),
        or `char`, makes from this corpus. Then the folder is that setting's, which training wrote,
        so that the same tokens are not stored twice.
        """
        for made_by in (setting, "char"):
            folder = self._folder_by(made_by)
            if holds_tokenizer(folder, made_by, self.tokenizer):
                return folder
        own = self._folder_by(self.tokenizer)
        if (
            isinstance(self.tokenizer, CharTokenizer)
            and not own.exists()  # so the corpus will be read anyway
            and "".join(self.tokenizer.characters) == self.contents.characters
        ):
            return self._folder_by("char")
        return own

    def _folder_by(self, tokenizer: str | Tokenizer) -> Path:
        """Return the cache's folder for this corpus and splitting, encoded by `tokenizer` (a
        tokenizer or a setting), whether or not it exists."""
        splits = self.splitting
        key = {
            **self.key,
            "version": CACHE_VERSION,
            "tokenizer": known_by(tokenizer),
            "splits": [splits.by, splits.validation_fraction, splits.test_fraction],
        }
        special = [text for text in self.special_texts if text != END_OF_TEXT]
        if special and isinstance(tokenizer, str):  # it is made with them, in this order
            key["special"] = special
        earlier = cached_folder({name: key[name] for name in key.keys() - ENCODED_WHOLE.keys()})
        return earlier if earlier.name in self.kept and earlier.exists() else cached_folder(key)


def cached_folder(key: Mapping[str, Any]) -> Path:
    """Return the cache's folder for prepared data, whether or not it exists. Its name is
    `key["name"]` and a hash over the JSON values in `key`, which must decide the data."""
    return cache_folder() / "prepared" / f"{key['name']}-{sha256_of_json(key)[:24]}"


def known_by(tokenizer: str | Tokenizer) -> str:
    """Return the text that stands for a tokenizer in the names of cache folders: the setting
    itself, or a tokenizer's hash."""
    return tokenizer if isinstance(tokenizer, str) else tokenizer.hash


def holds_tokenizer(folder: Path, setting: str, tokenizer: str | Tokenizer) -> bool:
    """Return True if the prepared tokens in `folder` were made with the same tokenizer as
    `tokenizer`, by its hash, so that they can be read instead of tokenizing the text again.

    setting: the value of `data.tokenizer` for which `folder` was prepared. Only a tokenizer that is
        made from the text (char, word, bpe:N) is stored in the folder; for any other setting the
        result is False.
    tokenizer: that of a trained model. The result is False if it is a setting (str) instead.
    """
    if isinstance(tokenizer, str) or not is_made_from_text(setting):
        return False
    file = folder / TOKENIZER_FILE
    return file.exists() and load_tokenizer(file).hash == tokenizer.hash
