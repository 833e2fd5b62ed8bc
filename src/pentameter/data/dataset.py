"""A data set as training and evaluation see it: a tokenizer and three splits of tokens."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pentameter.config.schema import DataConfig
from pentameter.data.corpora import corpus_text
from pentameter.data.prepare import (
    Contents,
    Progress,
    check_tokenizer_setting,
    prepare,
    read_contents,
)
from pentameter.data.shards import SPLITS, Shards, find_header, open_shards
from pentameter.data.storage import cache_folder
from pentameter.data.text import Text
from pentameter.data.token_sequence import TokenSequence
from pentameter.data.tokenizer import CharTokenizer, Tokenizer, load_tokenizer
from pentameter.errors import ConfigError, CorruptError

CACHE_VERSION = 1  # raise it when prepared data must change for the same text and settings


@dataclass(frozen=True)
class TokenSplit:
    """One split of a data set."""

    name: str
    """train, val or test."""
    tokens: TokenSequence
    """Token ids (n_tokens,), memory-mapped; reads like a 1-D array."""
    n_bytes: int
    """UTF-8 bytes of the split's text: bits per byte are per these."""

    @property
    def n_tokens(self) -> int:
        """Tokens in the split."""
        return len(self.tokens)


class Dataset:
    """Prepared data, opened and checked."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        tokens = shards.tokens()
        self._splits = {
            name: TokenSplit(name, tokens[name], shards.splits[name][2]) for name in SPLITS
        }

    @property
    def tokenizer(self) -> Tokenizer:
        """What made the tokens."""
        return self.shards.tokenizer

    @property
    def vocab_size(self) -> int:
        """Distinct ids."""
        return self.shards.tokenizer.vocab_size

    @property
    def hash(self) -> str:
        """sha256, in hex, of tokens, splits and tokenizer: the same data, wherever it lies."""
        return self.shards.hash

    def split(self, name: str) -> TokenSplit:
        """The split `train`, `val` or `test`; it may be empty. ConfigError for another name."""
        if name not in self._splits:
            raise ConfigError(f"there is no split {name!r}; possible: {', '.join(SPLITS)}")
        return self._splits[name]

    def verify(self) -> None:
        """Check every file against its sha256; CorruptError names the first that differs."""
        self.shards.verify()


def open_dataset(
    data: DataConfig, *, tokenizer: Tokenizer | None = None, progress: Progress | None = None
) -> Dataset:
    """The data set that `data` describes, prepared into the cache if it is not there yet.

    `tokenizer` takes the place of `data.tokenizer`: a trained model's own, for other text.

    The cache is keyed by the sha256 of the text itself with the settings that shape the tokens,
    so a changed file is never mistaken for the old one, at the price of reading the text once per
    start. Prepared shards, named by `data.path`, are opened as they are: their own splits and
    tokenizer count.

    Raises ConfigError (unknown corpus, missing path, empty text, a character the tokenizer does
    not know, …), CorruptError (damaged shards, a file that is not UTF-8 text), StorageError
    (reading or writing fails).
    """
    check_tokenizer_setting(data.tokenizer)
    if tokenizer is None and data.tokenizer != "char":
        tokenizer = load_tokenizer(data.tokenizer)
    if data.path is not None and (header := find_header(Path(data.path))) is not None:
        return _open_prepared(data, header, tokenizer)
    text = corpus_text(data)
    contents = None
    if text.identity is None:
        contents = read_contents(text, progress=progress)
        if tokenizer is not None and tokenizer.hash == CharTokenizer(contents.characters).hash:
            tokenizer = None  # what `char` makes of this text: do not keep the same tokens twice
    folder = _cached_folder(data, text, contents, tokenizer)
    header = folder / f"{text.name}.json"
    if not header.exists():
        prepare(
            text,
            folder,
            tokenizer=tokenizer or "char",
            validation_fraction=data.validation_fraction,
            test_fraction=data.test_fraction,
            contents=contents,
            progress=progress,
            keep_existing=True,
        )
    try:
        return Dataset(open_shards(header))
    except CorruptError as error:
        raise CorruptError(f"{error} (it is a cache: delete {folder} and start again)") from error


def _cached_folder(
    data: DataConfig, text: Text, contents: Contents | None, tokenizer: Tokenizer | None
) -> Path:
    """Where the cache keeps this text, cut with these settings."""
    settings = {
        "version": CACHE_VERSION,
        "name": text.name,
        "text": contents.sha256 if contents else text.identity,
        "tokenizer": tokenizer.hash if tokenizer else "char",
        "splits": [data.validation_fraction, data.test_fraction],
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "prepared" / f"{text.name}-{key[:24]}"


def _open_prepared(data: DataConfig, header: Path, tokenizer: Tokenizer | None) -> Dataset:
    if data.max_bytes is not None:
        raise ConfigError(
            f"data.max_bytes={data.max_bytes} cannot shorten prepared shards ({data.path}); "
            "give it to `prepare`, or leave it out"
        )
    shards = open_shards(header)
    if tokenizer is not None and tokenizer.hash != shards.tokenizer.hash:
        raise ConfigError(
            f"the shards {data.path} were written by another tokenizer (hash "
            f"{shards.tokenizer.hash[:12]}…) than is asked for ({tokenizer.hash[:12]}…); prepare "
            "the text again with `--tokenizer FILE`"
        )
    return Dataset(shards)
