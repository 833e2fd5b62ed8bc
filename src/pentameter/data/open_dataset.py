"""`open_dataset`: prepared shards as they are, or a text's shards from the cache, made if absent.

The cache is keyed by the sha256 of the text itself with the settings that shape the tokens, so a
changed file is never mistaken for the old one, at the price of reading the text once per start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pentameter.config.data_schema import FILE_DEFAULTS, DataConfig
from pentameter.data.corpora.conversations import Conversations, conversations_at
from pentameter.data.corpora.registry import corpus_text
from pentameter.data.corpora.text import Text
from pentameter.data.prepare.from_conversations import (
    chat_template,
    prepare_conversations,
    read_conversations,
)
from pentameter.data.prepare.from_text import Contents, prepare, read_contents
from pentameter.data.prepare.splits import Splitting
from pentameter.data.progress import Progress
from pentameter.data.shards.dataset import Dataset, TokenSplit, joined, open_shards
from pentameter.data.shards.format import SPLITS, TOKENIZER_FILE, find_header
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
    """The data set that `data` describes, prepared into the cache if it is not there yet; of
    several sources, each by itself and then joined.

    `tokenizer` takes the place of `data.tokenizer`: a trained model's own, for other text.
    With `verify` the files' content is checked against their hashes, which one process of each
    machine has to do. `warnings` takes what the user should know of a preparation. Prepared shards,
    named by `data.path`, are opened as they are: their own splits and tokenizer count.

    Raises ConfigError (unknown corpus, missing path, empty text, a character the tokenizer does
    not know, …), CorruptError (damaged shards, a file that is not UTF-8 text), StorageError
    (reading or writing fails).
    """
    if data.sources:
        return _open_sources(data, tokenizer, verify, progress, warnings)
    if data.path is not None and (header := find_header(Path(data.path))) is not None:
        dataset = open_shards(header, verify=verify, progress=progress)
        _check_prepared(data, dataset.tokenizer, tokenizer or data.tokenizer)
        return dataset
    wanted = chosen_tokenizer(tokenizer or data.tokenizer)
    conversations = None if data.path is None else conversations_at(data, [Path(data.path)])
    if conversations is not None:
        header = _prepared_conversations(data, conversations, wanted, progress, warnings)
        return _open_cached(header, verify, progress)
    if data.chat_template is not None:
        raise ConfigError(
            f"data.chat_template={data.chat_template!r} is for conversations, and "
            f"{data.path or data.corpus} holds text; leave it out"
        )
    given, text = wanted, corpus_text(data)
    if text.warning is not None and warnings is not None:
        warnings.append(text.warning)
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
    dataset = _open_cached(header, verify, progress)
    if isinstance(given, Tokenizer):  # the same tokens may have been prepared without it
        dataset.tokenizer.chat = given.chat
    return dataset


def _open_sources(
    data: DataConfig,
    tokenizer: Tokenizer | None,
    verify: bool,
    progress: Progress | None,
    warnings: list[str] | None,
) -> Dataset:
    """The data sets of all sources, joined; the first one's tokenizer cuts the text of the others.

    A tokenizer that is made from text is so made from the first source's.
    """
    opened: list[Dataset] = []
    for source in data.sources:
        dataset = open_dataset(
            _data_of(data, corpus=source.corpus, path=source.path),
            tokenizer=tokenizer,
            verify=verify,
            progress=progress,
            warnings=warnings,
        )
        tokenizer = dataset.tokenizer
        opened.append(dataset)
    names = [str(source.corpus or source.path) for source in data.sources]
    splits = {}
    for split in SPLITS:
        parts = [
            replace(dataset.split(split), name=f"{split} of {name}")
            for name, dataset in zip(names, opened, strict=True)
        ]
        splits[split] = joined(split, parts)
    if data.chat_template is not None and splits["train"].answers is None:
        raise ConfigError(
            f"data.chat_template={data.chat_template!r} is for conversations, and every one of "
            "data.sources holds text; leave it out"
        )
    with_chat = (dataset.tokenizer for dataset in opened if dataset.tokenizer.chat is not None)
    hashes = json.dumps([dataset.hash for dataset in opened])
    return Dataset(
        next(with_chat, opened[0].tokenizer), hashlib.sha256(hashes.encode()).hexdigest(), splits
    )


def open_evaluations(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    verify: bool = True,
    progress: Progress | None = None,
) -> dict[str, TokenSplit]:
    """The texts of `data.evaluations` by name, each whole, as tokens of `tokenizer`; errors are
    those of `open_dataset`."""
    found = {}
    for each in data.evaluations:
        dataset = open_dataset(
            _data_of(data, path=each.path, validation_fraction=0.0, test_fraction=0.0),
            tokenizer=tokenizer,
            verify=verify,
            progress=progress,
        )
        parts = [split for split in dataset.splits.values() if split.n_tokens]
        found[each.name] = replace(joined(each.name, parts), parts=())
    return found


def _data_of(data: DataConfig, **chosen: Any) -> DataConfig:
    """`data` with a data set of its own in place of those that it names."""
    own: dict[str, Any] = {
        "corpus": None,
        "path": None,
        "sources": (),
        "validation_path": None,
        "test_path": None,
    }
    own |= {"evaluations": (), "max_bytes": None, **chosen}
    path = own["path"]
    is_prepared = path is not None and find_header(Path(path)) is not None
    is_chat = (
        not is_prepared
        and path is not None
        and bool(conversations_at(data.model_copy(update=own), [Path(path)]))
    )
    if not is_chat:
        own["chat_template"] = None
    if is_prepared or path is None:
        own |= FILE_DEFAULTS
    return data.model_copy(update=own)


def _open_cached(header: Path, verify: bool, progress: Progress | None) -> Dataset:
    try:
        return open_shards(header, verify=verify, progress=progress)
    except CorruptError as error:
        raise CorruptError(
            f"{error} (it is a cache: delete {header.parent} and start again)"
        ) from error


def _prepared_conversations(
    data: DataConfig,
    conversations: Conversations,
    wanted: str | Tokenizer,
    progress: Progress | None,
    warnings: list[str] | None,
) -> Path:
    """The header of conversations' shards in the cache, prepared where they are not there yet."""
    chat = chat_template(data.chat_template, wanted)
    splitting = Splitting(data.validation_fraction, data.test_fraction, data.split_by)
    contents = read_conversations(conversations, chat, wanted, splitting, progress=progress)
    folder = _folder_of(
        {
            "name": conversations.name,
            "conversations": contents.sha256,
            "held_out": {split: other.sha256 for split, other in contents.held_out.items()},
            "tokenizer": wanted if isinstance(wanted, str) else wanted.hash,
            "chat": None if chat is None else chat.to_json(),  # which goes into the tokenizer
            "splits": [data.split_by, data.validation_fraction, data.test_fraction],
        }
    )
    header = folder / f"{conversations.name}.json"
    if not header.exists():
        prepare_conversations(
            contents, folder, wanted, progress=progress, warnings=warnings, keep_existing=True
        )
    return header


def is_at_hand(data: DataConfig) -> bool:
    """True if `open_dataset` needs no download of GPT-2's tokenizer."""
    paths = [source.path for source in data.sources] or [data.path]
    prepared = all(path is not None and find_header(Path(path)) is not None for path in paths)
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
    return _folder_of(
        {
            "name": text.name,
            "text": contents.sha256 if contents else text.identity,
            "held_out": {split: other.sha256 for split, other in held_out.items()},
            "tokenizer": tokenizer if isinstance(tokenizer, str) else tokenizer.hash,
            "splits": [data.split_by, data.validation_fraction, data.test_fraction],
        }
    )


def _folder_of(settings: Mapping[str, Any]) -> Path:
    """The folder in which the cache keeps what these settings give; `name` is one of them."""
    settings = {"version": CACHE_VERSION, **settings}
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "prepared" / f"{settings['name']}-{key[:24]}"


def _check_prepared(data: DataConfig, found: Tokenizer, wanted: str | Tokenizer) -> None:
    """Raise ConfigError where `data`, or the `wanted` tokenizer, asks for what prepared shards with
    the tokenizer `found` are not."""
    if data.max_bytes is not None:
        raise ConfigError(
            f"data.max_bytes={data.max_bytes} cannot shorten prepared shards ({data.path}); "
            "give it to `prepare`, or leave it out"
        )
    for key in ("validation_path", "test_path", "chat_template"):
        if (value := getattr(data, key)) is not None:
            raise ConfigError(
                f"data.{key}={value!r} stands beside prepared shards ({data.path}), which are as "
                "they were prepared; give it to `prepare`, or leave it out"
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
