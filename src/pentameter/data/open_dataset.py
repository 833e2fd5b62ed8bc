"""The one way from `[data]` to tokens: `open_dataset` opens prepared shards; for any other data, it
opens shards in the cache, which are written if absent. `preparation_of` is for writing shards
elsewhere (`prepare`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pentameter.config.choices import FILE_DEFAULTS, TEMPLATE_DATE
from pentameter.config.data_schema import DataConfig
from pentameter.data.corpora.conversations import Conversations
from pentameter.data.corpora.registry import corpus_of
from pentameter.data.prepare.background import TokenStreamPreparation
from pentameter.data.prepare.from_conversations import ConversationPreparation
from pentameter.data.prepare.from_text import TextPreparation
from pentameter.data.prepare.preparation import Preparation
from pentameter.data.prepare.splits import Splitting
from pentameter.data.progress import Progress, no_progress
from pentameter.data.shards.dataset import Dataset, TokenSplit, concatenated, first_tokens
from pentameter.data.shards.format import SPLITS, find_header
from pentameter.data.shards.opening import open_shards
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.chat import chosen_chat_template
from pentameter.data.tokenizers.setting import (
    GPT2,
    chosen_tokenizer,
    gpt2_is_cached,
    is_gpt2,
    special_texts_of,
)
from pentameter.disk.cache import telling_of_the_cache
from pentameter.errors import ConfigError

NOT_OF_SHARDS = {"chat_template": None, "template_date": TEMPLATE_DATE, **FILE_DEFAULTS}
"""Keys in `[data]`, with their defaults, that decide how text files are read. With prepared shards
any other value is refused, or ignored among several `data.sources`."""
_SEEN_TOKENS = 2**20
"""First training tokens that are counted, to see whether a model learns what a newline is."""
_LEAST_DOCUMENTS, _TIMES_APART = 100, 4
"""A model learns how documents begin from so many, if they are at most so many times as far apart
as the average token's occurrences are. With a hundred documents in 442,090 tokens of 2,048 kinds,
1.1 times as far, it wrote text after an end of text; with ten, noise."""


@telling_of_the_cache()
def open_dataset(
    data: DataConfig,
    *,
    tokenizer: Tokenizer | None = None,
    verify: bool = True,
    progress: Progress = no_progress,
    warnings: list[str] | None = None,
    kept: Collection[str] = (),
) -> Dataset:
    """Open the data set that `data` describes. Text is first tokenized into the cache, if it is not
    there yet. Prepared shards, named by `data.path`, are opened with their own splits and
    tokenizer. Several `data.sources` are opened one by one and concatenated, all encoded by the
    first one's tokenizer.

    tokenizer: replaces `data.tokenizer`, as a trained model's does; prepared shards must have been
        written with it. None: as configured.
    verify: whether to check files against their hashes, and, for `data.order` = `streamed`, to
        tokenize the text; one process per machine must.
    progress: called with a pass's name, the bytes done and the bytes in all.
    warnings: collects sentences for the user.
    kept: names of folders in the cache that a resumed run has read; they are opened again even if
        this version would tokenize the text in another way.

    Raises ConfigError (unknown corpus, missing path, empty text, a character outside the
    vocabulary, another tokenizer than the shards', …), CorruptError (damaged shards, a file that is
    not UTF-8 text), StorageError (reading or writing fails).
    """
    sections = [_data_of(data, corpus=each.corpus, path=each.path) for each in data.sources]
    opened: list[Dataset] = []
    warnings = [] if warnings is None else warnings
    opener = _Opener(verify, progress, warnings, kept, bool(sections))
    for section in sections or [data]:
        dataset = opener.open(section, tokenizer)
        if dataset.is_of_fragments:
            warnings.append(
                f"the conversations in {dataset.folders[0]} were encoded in fragments by an "
                "earlier version, so some of their tokens may be others than those of a prompt; "
                "prepare them again for a new run"
            )
        opened.append(dataset)
        tokenizer = dataset.tokenizer
    found = joined_sources(data, opened) if sections else opened[0]
    found.tokenizer.opening = _opening(found)
    return found


def _opening(dataset: Dataset) -> Sequence[int]:
    """Return the ids that an empty prompt becomes for a model that learns from a data set. A token
    that it hardly ever reads, such as the end of a text that is one document, would have it go on
    with others of that kind, which are noise.

    There are none if it learns how documents begin. Else they are a newline, and where the text has
    too few, its commonest token."""
    tokenizer, split = dataset.tokenizer, dataset.split("train")
    first = first_tokens(split, _SEEN_TOKENS)
    whole = first if split.beginning else split  # of a stream, the rest is not known yet
    apart = _TIMES_APART * tokenizer.vocab_size
    n_documents = len(whole.document_starts)
    knows_beginnings = n_documents >= _LEAST_DOCUMENTS and whole.n_tokens <= n_documents * apart
    if knows_beginnings or not first.n_tokens:
        return ()
    counts = np.bincount(first.tokens[:], minlength=tokenizer.vocab_size)
    try:
        newline = tokenizer.encode("\n").tolist()
    except ConfigError:  # a character that the text does not have
        newline = []
    is_learned = len(newline) > 0 and first.n_tokens <= int(counts[newline].min()) * apart
    return newline if is_learned else [int(counts.argmax())]


@dataclass(frozen=True)
class _Opener:
    """Opens one data set after another in the same way; the arguments `verify`, `progress`,
    `warnings` and `kept` are as in `open_dataset`."""

    verify: bool
    progress: Progress
    warnings: list[str]
    kept: Collection[str]
    are_several: bool
    """Whether the data set is one of several `data.sources`, which have one set of settings. A
    setting that cannot apply to it is then ignored instead of refused: settings of files for
    prepared shards, a chat template for text (but for its special tokens)."""

    def open(self, data: DataConfig, tokenizer: Tokenizer | None) -> Dataset:
        """Open the data set at `data.path` or `data.corpus`; `data.sources` is not read.
        `tokenizer` replaces `data.tokenizer` unless None."""
        wanted, warnings = tokenizer or data.tokenizer, self.warnings
        if (header := find_header(data.path)) is not None:
            dataset = open_shards(header, verify=self.verify, progress=self.progress)
            settings = data.model_copy(update=NOT_OF_SHARDS) if self.are_several else data
            warnings += _check_prepared(settings, dataset.tokenizer, wanted)
            return dataset
        preparation = preparation_of(
            data, wanted, is_shared=self.are_several, progress=self.progress
        )
        preparation = replace(preparation, kept=self.kept)
        warnings += preparation.corpus.warnings
        dataset = preparation.open_cached(data.tokenizer, verify=self.verify, warnings=warnings)
        warnings += preparation.remarks
        dataset = replace(dataset, holds=(preparation.holds,))
        known = preparation.tokenizer
        if isinstance(known, Tokenizer):  # the same tokens may have been prepared without these
            dataset.tokenizer.published = known.published
            if not dataset.has_conversations:
                dataset.tokenizer.chat = known.chat
        return dataset


def preparation_of(
    data: DataConfig,
    tokenizer: str | Tokenizer,
    *,
    paths: Sequence[str | Path] = (),
    is_shared: bool = False,
    progress: Progress,
) -> Preparation:
    """Return a Preparation for the corpus that `data` names, or for the files at `paths` instead.
    It can write token shards, or open them from the cache; nothing is encoded yet.

    tokenizer: encodes the corpus; a tokenizer, or a setting (`gpt2`, a file, or `char`, `word` and
    `bpe:N`, which are made from the corpus later). is_shared: whether other corpora have the same
    settings; text then takes the special tokens of a chat template, instead of refusing it.

    Raises ConfigError (unknown corpus, missing path, impossible tokenizer), CorruptError or
    StorageError (damaged or unreadable files).
    """
    corpus, wanted = corpus_of(data, paths), chosen_tokenizer(tokenizer)
    splitting = Splitting(data.validation_fraction, data.test_fraction, data.split_by)
    chat = None if isinstance(wanted, str) else wanted.chat
    if data.chat_template is not None:
        chat = chosen_chat_template(data.chat_template)
    special = special_texts_of(wanted, chat)
    if isinstance(corpus, Conversations):
        date = data.template_date
        return ConversationPreparation(corpus, wanted, splitting, progress, special, chat, date)
    if data.chat_template is not None and not is_shared:
        raise ConfigError(
            f"data.chat_template={data.chat_template!r} is for conversations, and "
            f"{data.path or data.corpus} holds text; leave it out"
            + "".join(f" ({warning})" for warning in corpus.warnings)
        )
    kind = TokenStreamPreparation if data.order == "streamed" else TextPreparation
    return kind(corpus, wanted, splitting, progress, special)


def joined_sources(data: DataConfig, opened: Sequence[Dataset]) -> Dataset:
    """Concatenate the data sets opened for `data.sources` (`opened`, in the same order), split by
    split; each resulting split lists its parts. The tokenizer is the first that has a chat
    template, else the first; the hash covers all hashes. Raises ConfigError for a chat template if
    no source has conversations."""
    splits = {}
    for split in SPLITS:
        parts = [
            replace(dataset.split(split), name=f"{split} of {source.shown}")
            for source, dataset in zip(data.sources, opened, strict=True)
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
        holds=tuple(next(iter(dataset.holds), "") for dataset in opened),
    )


def open_evaluations(
    data: DataConfig, tokenizer: Tokenizer, *, verify: bool, progress: Progress
) -> dict[str, TokenSplit]:
    """Open each text in `data.evaluations`, whole, as one split with tokens by `tokenizer`; return
    them, entry's name → split. Entries without a path (questions) are left out. `verify` checks
    files against their hashes; `progress` is called with a pass's name, the bytes done and the
    bytes in all. Raises ConfigError, CorruptError and StorageError as `open_dataset` does."""
    found, opener = {}, _Opener(verify, progress, warnings=[], kept=(), are_several=True)
    for each in data.evaluations:
        if each.path is None:  # questions
            continue
        whole = {"validation_fraction": 0.0, "test_fraction": 0.0, "order": "sequential"}
        section = _data_of(data, path=each.path, **whole)
        dataset = opener.open(section, tokenizer)
        parts = [split for split in dataset.splits.values() if split.n_tokens]
        found[each.name] = replace(concatenated(each.name, parts), parts=())
    return found


def _data_of(data: DataConfig, **chosen: Any) -> DataConfig:
    """Return `data` with its corpus, paths, sources and evaluations cleared and the fields in
    `chosen` set."""
    absent = dict.fromkeys(("corpus", "path", "max_bytes", "validation_path", "test_path"))
    return data.model_copy(update={**absent, "sources": (), "evaluations": (), **chosen})


def needs_no_download(data: DataConfig) -> bool:
    """Return True if `open_dataset` can open `data` without downloading GPT-2's tokenizer: the
    setting is not `gpt2`, all data are prepared shards, or its files are in the cache."""
    paths = [source.path for source in data.sources] or [data.path]
    prepared = all(find_header(path) is not None for path in paths)
    return data.tokenizer != GPT2 or prepared or gpt2_is_cached()


def _check_prepared(data: DataConfig, found: Tokenizer, wanted: str | Tokenizer) -> list[str]:
    """Check that prepared shards suit the settings in `data` and the `wanted` tokenizer. `found` is
    the tokenizer that the shards were written with. Raises ConfigError if they do not. Returns a
    list with a warning if the tokenizers differ only in the tokens that begin a document, else an
    empty list.

    `wanted` may be a setting. `char`, the default, suits any tokenizer; other settings must name
    the shards' kind of tokenizer, and at least its vocabulary size if they give one, as a short
    text gives fewer tokens than were asked for.
    """
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
    elif wanted.hash_of_ids != found.hash_of_ids:
        raise ConfigError(
            f"the shards {data.path} were written by another tokenizer (hash "
            f"{found.hash[:12]}…) than is asked for ({wanted.hash[:12]}…); prepare "
            "the text again with `--tokenizer FILE`"
        )
    elif wanted.hash != found.hash:
        return [
            f"the shards {data.path} begin each document with {found.shown_prefix}, the "
            f"tokenizer asked for with {wanted.shown_prefix}; to have them alike, prepare the "
            "text again with `--tokenizer FILE`"
        ]
    return []
