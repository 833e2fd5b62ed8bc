"""A corpus with the settings that make shards of it: the one way from `[data]` to token shards."""

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
    """What becomes shards: a corpus, the tokenizer that encodes it, and how it is split."""

    corpus: Text | Conversations
    tokenizer: str | Tokenizer
    """A tokenizer, or a setting that the text decides."""
    splitting: Splitting
    chat: ChatTemplate | None
    """Renders messages; None leaves the tokenizer's own."""
    progress: Progress = no_progress

    @cached_property
    def contents(self) -> Contents:
        """The contents of the corpus, found by reading it once when they are first asked for."""
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
        """JSON values by which a cache knows the contents. They are read for it, unless the corpus
        is known without."""
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
        """Write the shards; see `prepare_contents`."""
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
    """Open the corpus that `data` names, or that lies at `paths`, to be encoded by `tokenizer`.

    If `is_shared`, other corpora have the same settings, and a chat template is passed over by
    text, not refused. Errors as `corpus_of` and `chosen_tokenizer`.
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
