"""`open_dataset`: prepared shards as they are, or a text's shards from the cache, made if absent.

The cache is keyed by the text's sha256 and the settings that shape the tokens, so a changed file is
never mistaken for the old one, at the price of reading the text once per start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pentameter.config.data_schema import FILE_DEFAULTS, DataConfig
from pentameter.config.urls import shown_path
from pentameter.data.corpora.conversations import conversations_at
from pentameter.data.corpora.registry import corpus_text
from pentameter.data.corpora.text import Text
from pentameter.data.prepare.contents import Contents, prepare_contents
from pentameter.data.prepare.from_conversations import chat_template, read_conversations
from pentameter.data.prepare.from_text import TextContents, read_contents
from pentameter.data.prepare.splits import Splitting
from pentameter.data.progress import Progress, no_progress
from pentameter.data.shards.dataset import Dataset, TokenSplit, concatenated, open_shards
from pentameter.data.shards.format import SPLITS, TOKENIZER_FILE, find_header
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.setting import (
    GPT2,
    chosen_tokenizer,
    gpt2_is_cached,
    is_gpt2,
    is_made_from_text,
    load_tokenizer,
)
from pentameter.disk.cache import cache_folder
from pentameter.errors import ConfigError, CorruptError

NOT_OF_SHARDS = {"chat_template": None, **FILE_DEFAULTS}
"""Keys in `[data]`, with their defaults, that say how files are read; prepared shards ignore
them."""
CACHE_VERSION = 2  # raise it when prepared data must change for the same text and settings


def open_dataset(
    data: DataConfig,
    *,
    tokenizer: Tokenizer | None = None,
    verify: bool = True,
    progress: Progress = no_progress,
    warnings: list[str] | None = None,
) -> Dataset:
    """Open the data set that `data` describes, prepared into the cache if it is not there yet;
    several sources are opened one by one and then concatenated.

    `tokenizer` replaces `data.tokenizer`: a trained model's, for other text. `verify`: check the
    files against their hashes, which one process per machine has to do. `warnings` collects
    sentences for the user. Prepared shards, named by `data.path`, are opened with their own splits
    and tokenizer.

    Raises ConfigError (unknown corpus, missing path, empty text, a character outside the
    vocabulary, …), CorruptError (damaged shards, a file that is not UTF-8 text), StorageError
    (reading or writing fails).
    """
    if data.sources:
        open_one = partial(
            _open_one, verify=verify, progress=progress, warnings=warnings, is_shared=True
        )
        return _open_sources(data, tokenizer, open_one)
    return _open_one(data, tokenizer, verify=verify, progress=progress, warnings=warnings)


def _open_one(
    data: DataConfig,
    tokenizer: Tokenizer | None,
    *,
    verify: bool,
    progress: Progress,
    warnings: list[str] | None = None,
    is_shared: bool = False,
) -> Dataset:
    """Open a data set that has one source. If `is_shared`, other data sets have the same settings,
    and those that do not concern this kind of data are passed over, not refused."""
    if data.path is not None and (header := find_header(Path(data.path))) is not None:
        dataset = open_shards(header, verify=verify, progress=progress)
        settings = data.model_copy(update=NOT_OF_SHARDS) if is_shared else data
        _check_prepared(settings, dataset.tokenizer, tokenizer or data.tokenizer)
        return dataset
    given = wanted = chosen_tokenizer(tokenizer or data.tokenizer)
    splitting = Splitting(data.validation_fraction, data.test_fraction, data.split_by)
    conversations = None if data.path is None else conversations_at(data, [data.path])
    contents: Contents | None = None
    text: Text | None = None
    if conversations is not None:
        chat = chat_template(data.chat_template, wanted)
        contents = read_conversations(conversations, chat, wanted, splitting, progress=progress)
        key = contents.key
        if warnings is not None:
            warnings += conversations.warnings
    else:
        if data.chat_template is not None and not is_shared:
            raise ConfigError(
                f"data.chat_template={data.chat_template!r} is for conversations, and "
                f"{data.path or data.corpus} holds text; leave it out"
            )
        text = corpus_text(data)
        if text.warning is not None and warnings is not None:
            warnings.append(text.warning)
        key = {"name": text.name, "text": text.identity, "held_out": {}}
        if text.identity is None:
            contents = read_contents(text, splitting, progress=progress)
            key = contents.key
            wanted = _as_setting(data, contents, wanted)
    folder = _cached_folder(data, key, wanted)
    header = folder / f"{key['name']}.json"
    if not header.exists():
        if contents is None:
            assert text is not None  # generated, and so far known by its settings alone
            contents = read_contents(text, splitting, progress=progress)
        prepare_contents(
            contents,
            folder,
            wanted,
            progress=progress,
            warnings=warnings,
            keep_existing=True,
        )
    try:
        dataset = open_shards(header, verify=verify, progress=progress)
    except CorruptError as error:
        raise CorruptError(f"{error} (it is a cache: delete {folder} and start again)") from error
    if isinstance(given, Tokenizer) and conversations is None:
        dataset.tokenizer.chat = given.chat  # the same tokens may have been prepared without it
    return dataset


def _open_sources(
    data: DataConfig, tokenizer: Tokenizer | None, open_one: Callable[..., Dataset]
) -> Dataset:
    """Open all sources and concatenate them; the first one's tokenizer encodes the others' text.

    A tokenizer that is made from text is made from the first source's.
    """
    opened: list[Dataset] = []
    for source in data.sources:
        section = _data_of(data, corpus=source.corpus, path=source.path)
        opened.append(open_one(section, tokenizer))
        tokenizer = opened[-1].tokenizer
    return joined_sources(data, opened)


def joined_sources(data: DataConfig, opened: Sequence[Dataset]) -> Dataset:
    """Concatenate the data sets of `data.sources`, split by split; each split knows its parts."""
    names = [source.corpus or shown_path(source.path or "") for source in data.sources]
    splits = {}
    for split in SPLITS:
        parts = [
            replace(dataset.split(split), name=f"{split} of {name}")
            for name, dataset in zip(names, opened, strict=True)
        ]
        splits[split] = concatenated(split, parts)
    if data.chat_template is not None and splits["train"].assistant is None:
        raise ConfigError(
            f"data.chat_template={data.chat_template!r} is for conversations, and every one of "
            "data.sources holds text; leave it out"
        )
    with_chat = (dataset.tokenizer for dataset in opened if dataset.tokenizer.chat is not None)
    hashes = json.dumps([dataset.hash for dataset in opened])
    return Dataset(
        next(with_chat, opened[0].tokenizer),
        hashlib.sha256(hashes.encode()).hexdigest(),
        splits,
        tuple(folder for dataset in opened for folder in dataset.folders),
    )


def open_evaluations(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    verify: bool = True,
    progress: Progress = no_progress,
) -> dict[str, TokenSplit]:
    """Open the texts in `data.evaluations` by name, each whole, as tokens of `tokenizer`; errors as
    `open_dataset`."""
    found = {}
    for each in data.evaluations:
        if each.path is None:  # questions
            continue
        section = _data_of(data, path=each.path, validation_fraction=0.0, test_fraction=0.0)
        dataset = _open_one(section, tokenizer, verify=verify, progress=progress, is_shared=True)
        parts = [split for split in dataset.splits.values() if split.n_tokens]
        found[each.name] = replace(concatenated(each.name, parts), parts=())
    return found


def _data_of(data: DataConfig, **chosen: Any) -> DataConfig:
    """Copy `data` with other data in place of those that it names."""
    absent = dict.fromkeys(("corpus", "path", "max_bytes", "validation_path", "test_path"))
    return data.model_copy(update={**absent, "sources": (), "evaluations": (), **chosen})


def needs_no_download(data: DataConfig) -> bool:
    """True if `open_dataset` can do without downloading GPT-2's tokenizer."""
    paths = [source.path for source in data.sources] or [data.path]
    prepared = all(path is not None and find_header(Path(path)) is not None for path in paths)
    return data.tokenizer != GPT2 or prepared or gpt2_is_cached()


def _as_setting(
    data: DataConfig, contents: TextContents, wanted: str | Tokenizer
) -> str | Tokenizer:
    """Return the setting that makes the wanted tokenizer from this text, if one is known to; else
    the tokenizer.

    With a trained model's tokenizer, this finds the shards from its training: the same tokens are
    not stored twice.
    """
    if isinstance(wanted, str):
        return wanted
    if isinstance(wanted, CharTokenizer) and "".join(wanted.characters) == contents.characters:
        return "char"
    if is_made_from_text(data.tokenizer):
        made = _cached_folder(data, contents.key, data.tokenizer) / TOKENIZER_FILE
        if made.exists() and load_tokenizer(made).hash == wanted.hash:
            return data.tokenizer
    return wanted


def _cached_folder(data: DataConfig, key: Mapping[str, Any], tokenizer: str | Tokenizer) -> Path:
    """Return the cache's folder for contents with this key, encoded and split by these settings."""
    settings = {
        **key,
        "version": CACHE_VERSION,
        "tokenizer": tokenizer if isinstance(tokenizer, str) else tokenizer.hash,
        "splits": [data.split_by, data.validation_fraction, data.test_fraction],
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "prepared" / f"{key['name']}-{digest[:24]}"


def _check_prepared(data: DataConfig, found: Tokenizer, wanted: str | Tokenizer) -> None:
    """Raise ConfigError if `data`, or the `wanted` tokenizer, contradicts prepared shards with the
    tokenizer `found`."""
    absent = dict.fromkeys(("max_bytes", "validation_path", "test_path"))
    for key, usual in {**absent, **NOT_OF_SHARDS}.items():
        if (value := getattr(data, key)) != usual:
            raise ConfigError(
                f"data.{key}={value!r} cannot change prepared shards ({data.path}); give it to "
                "`prepare`, or leave it out"
            )
    if wanted != GPT2:  # which is known by its hash: its files need not be at hand
        wanted = chosen_tokenizer(wanted)
    if isinstance(wanted, str):
        # `char` is the default, and says nothing of shards.
        kind, _, size = wanted.partition(":")
        # A short text gives fewer tokens than were asked for.
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
