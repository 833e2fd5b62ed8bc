"""A corpus with the settings that make token shards from it: the single path from `[data]` to
shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pentameter.config.data_schema import DataConfig
from pentameter.data.corpora.conversations import Conversations
from pentameter.data.corpora.registry import corpus_of
from pentameter.data.corpora.text import Text
from pentameter.data.prepare.contents import Contents, prepare_contents
from pentameter.data.prepare.from_conversations import read_conversations
from pentameter.data.prepare.from_text import read_contents
from pentameter.data.prepare.splits import Splitting
from pentameter.data.progress import Progress, no_progress
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chat import ChatTemplate, chosen_chat_template
from pentameter.data.tokenizers.setting import chosen_tokenizer
from pentameter.errors import ConfigError


@dataclass(frozen=True)
class Preparation:
    """A corpus, with the tokenizer that encodes it and how it is split into train, val and test."""

    corpus: Text | Conversations
    tokenizer: str | Tokenizer
    """A tokenizer, or a setting (`char`, `word`, `bpe:N`) whose tokenizer is made from the text."""
    splitting: Splitting
    chat: ChatTemplate | None
    """The template that renders messages; None for text, or if the tokenizer has none either."""
    progress: Progress = no_progress

    @cached_property
    def contents(self) -> Contents:
        """Hash, sizes and splits of the corpus, found by reading it once on first access."""
        if isinstance(self.corpus, Conversations):
            special = {} if isinstance(self.tokenizer, str) else self.tokenizer.special_tokens
            return read_conversations(
                self.corpus, self.chat, special, self.splitting, progress=self.progress
            )
        needs_characters = self.tokenizer == "char" or isinstance(self.tokenizer, CharTokenizer)
        return read_contents(
            self.corpus, self.splitting, characters=needs_characters, progress=self.progress
        )

    @property
    def key(self) -> dict[str, Any]:
        """JSON values that identify the contents in a cache. The corpus is read for them, unless
        its identity is known without."""
        if isinstance(self.corpus, Text) and (identity := self.corpus.identity) is not None:
            return {"name": self.corpus.name, "text": identity, "held_out": {}}
        return self.contents.key

    def write_shards(
        self,
        folder: Path,
        *,
        warnings: list[str],
        count_tokens: Callable[[int], None] | None = None,
        keep_existing: bool = False,
    ) -> None:
        """Write the shards into a new `folder`, which appears whole or not at all. `count_tokens`
        is called with the tokens written so far; `warnings` collects sentences for the user; with
        `keep_existing`, a folder that has appeared meanwhile is kept. Raises ConfigError and
        StorageError as `prepare_contents` does."""
        prepare_contents(
            self.contents,
            folder,
            self.tokenizer,
            progress=self.progress,
            count_tokens=count_tokens,
            warnings=warnings,
            keep_existing=keep_existing,
        )


def preparation_of(
    data: DataConfig,
    tokenizer: str | Tokenizer,
    *,
    paths: Sequence[str | Path] = (),
    is_shared: bool = False,
    progress: Progress = no_progress,
) -> Preparation:
    """Open the corpus that `data` names, or the files at `paths` instead, to be encoded by
    `tokenizer` (or made from text by that setting).

    If `is_shared`, other corpora have the same settings, and text ignores a chat template instead
    of refusing it. Raises ConfigError (unknown corpus, missing path, impossible tokenizer),
    CorruptError or StorageError (damaged or unreadable files).
    """
    corpus, wanted = corpus_of(data, paths), chosen_tokenizer(tokenizer)
    if isinstance(corpus, Text) and data.chat_template is not None and not is_shared:
        raise ConfigError(
            f"data.chat_template={data.chat_template!r} is for conversations, and "
            f"{data.path or data.corpus} holds text; leave it out"
        )
    if isinstance(corpus, Text):
        chat = None
    elif data.chat_template is not None:
        chat = chosen_chat_template(data.chat_template)
    else:
        chat = None if isinstance(wanted, str) else wanted.chat
    splitting = Splitting(data.validation_fraction, data.test_fraction, data.split_by)
    return Preparation(corpus, wanted, splitting, chat, progress)
