"""`open_dataset`: prepared shards as they are, or a text's shards from the cache, made if absent.

The cache is keyed by the sha256 of the text itself with the settings that shape the tokens, so a
changed file is never mistaken for the old one, at the price of reading the text once per start.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pentameter.config.schema import FILE_DEFAULTS, DataConfig
from pentameter.data.corpora.registry import corpus_text
from pentameter.data.corpora.text import Text
from pentameter.data.prepare.from_text import Contents, prepare, read_contents
from pentameter.data.prepare.splits import Splitting
from pentameter.data.progress import Progress
from pentameter.data.shards.dataset import Dataset, open_shards
from pentameter.data.shards.format import TOKENIZER_FILE, find_header
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.setting import (
    GPT2,
    chosen_tokenizer,
    gpt2_is_at_hand,
    is_gpt2,
    is_made_from_text,
    load_tokenizer,
)
from pentameter.disk.cache import cache_folder
from pentameter.errors import ConfigError, CorruptError

CACHE_VERSION = 2  # raise it when prepared data must change for the same text and settings


def open_dataset(
    data: DataConfig,
    *,
    tokenizer: Tokenizer | None = None,
    verify: bool = True,
    progress: Progress | None = None,
    warnings: list[str] | None = None,
) -> Dataset:
    """The data set that `data` describes, prepared into the cache if it is not there yet.

    `tokenizer` takes the place of `data.tokenizer`: a trained model's own, for other text.
    With `verify` the files' content is checked against their hashes, which one process of each
    machine has to do. `warnings` takes what the user should know of a preparation. Prepared shards,
    named by `data.path`, are opened as they are: their own splits and tokenizer count.

    Raises ConfigError (unknown corpus, missing path, empty text, a character the tokenizer does
    not know, …), CorruptError (damaged shards, a file that is not UTF-8 text), StorageError
    (reading or writing fails).
    """
    if data.path is not None and (header := find_header(Path(data.path))) is not None:
        dataset = open_shards(header, verify=verify, progress=progress)
        _check_prepared(data, dataset.tokenizer, tokenizer or data.tokenizer)
        return dataset
    wanted = chosen_tokenizer(tokenizer or data.tokenizer)
    text = corpus_text(data)
    splitting = Splitting(data.validation_fraction, data.test_fraction, data.split_by)
    contents = None
    if text.identity is None:
        contents = read_contents(text, splitting, progress=progress)
        wanted = _as_setting(data, text, contents, wanted)
    folder = _cached_folder(data, text, contents, wanted)
    header = folder / f"{text.name}.json"
    if not header.exists():
        prepare(
            text,
            folder,
            tokenizer=wanted,
            splitting=splitting,
            contents=contents,
            progress=progress,
            warnings=warnings,
            keep_existing=True,
        )
    try:
        return open_shards(header, verify=verify, progress=progress)
    except CorruptError as error:
        raise CorruptError(f"{error} (it is a cache: delete {folder} and start again)") from error


def is_at_hand(data: DataConfig) -> bool:
    """True if `open_dataset` needs no download of GPT-2's tokenizer."""
    prepared = data.path is not None and find_header(Path(data.path)) is not None
    return data.tokenizer != GPT2 or prepared or gpt2_is_at_hand()


def _as_setting(
    data: DataConfig, text: Text, contents: Contents, wanted: str | Tokenizer
) -> str | Tokenizer:
    """The setting that makes the wanted tokenizer of this text, if it is known to.

    So a trained model's tokenizer finds what its training prepared: the same tokens are not kept
    twice.
    """
    if isinstance(wanted, str):
        return wanted
    if wanted.hash == CharTokenizer(contents.characters).hash:
        return "char"
    if is_made_from_text(data.tokenizer):
        made = _cached_folder(data, text, contents, data.tokenizer) / TOKENIZER_FILE
        if made.exists() and load_tokenizer(made).hash == wanted.hash:
            return data.tokenizer
    return wanted


def _cached_folder(
    data: DataConfig, text: Text, contents: Contents | None, tokenizer: str | Tokenizer
) -> Path:
    """The folder in which the cache keeps this text, cut with these settings."""
    held_out = contents.held_out if contents else {}
    settings = {
        "version": CACHE_VERSION,
        "name": text.name,
        "text": contents.sha256 if contents else text.identity,
        "held_out": {split: other.sha256 for split, other in held_out.items()},
        "tokenizer": tokenizer if isinstance(tokenizer, str) else tokenizer.hash,
        "splits": [data.split_by, data.validation_fraction, data.test_fraction],
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "prepared" / f"{text.name}-{key[:24]}"


def _check_prepared(data: DataConfig, found: Tokenizer, wanted: str | Tokenizer) -> None:
    """Raise ConfigError where `data`, or the `wanted` tokenizer, asks for what prepared shards with
    the tokenizer `found` are not."""
    if data.max_bytes is not None:
        raise ConfigError(
            f"data.max_bytes={data.max_bytes} cannot shorten prepared shards ({data.path}); "
            "give it to `prepare`, or leave it out"
        )
    for key in ("validation_path", "test_path"):
        if (value := getattr(data, key)) is not None:
            raise ConfigError(
                f"data.{key}={value!r} stands beside prepared shards ({data.path}), which have "
                "their own splits; give it to `prepare`, or leave it out"
            )
    for key, usual in FILE_DEFAULTS.items():
        if (value := getattr(data, key)) != usual:
            raise ConfigError(
                f"data.{key}={value!r} is of files of text, and {data.path} holds prepared shards; "
                "leave it out"
            )
    if wanted != GPT2:  # which is known by its hash: its files need not be at hand
        wanted = chosen_tokenizer(wanted)
    if isinstance(wanted, str):
        # `char` is the default, and says nothing of shards.
        kind, _, size = wanted.partition(":")
        # A short text gives fewer pieces than were asked for.
        differs = kind != found.kind or (size and found.vocab_size > int(size))
        differs = not is_gpt2(found) if wanted == GPT2 else differs
        if wanted != "char" and differs:
            raise ConfigError(
                f"the shards {data.path} were written by a tokenizer of kind {found.kind!r} with "
                f"{found.vocab_size} tokens, not data.tokenizer={wanted!r}; leave that out, or "
                "prepare the text again"
            )
    elif wanted.hash != found.hash:
        raise ConfigError(
            f"the shards {data.path} were written by another tokenizer (hash "
            f"{found.hash[:12]}…) than is asked for ({wanted.hash[:12]}…); prepare "
            "the text again with `--tokenizer FILE`"
        )
