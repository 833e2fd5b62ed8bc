"""Conversations into token shards, with the answers, which are what a model learns of them.

Messages become text by the tokenizer's chat template; prompt and completion stay as they are, with
the end of text behind. A prompt and an answer are encoded each by itself, as the prompt is when a
model is asked. No conversation is ever cut: each lies in one split, by its place among all or by
the hash of its text. Two passes, as over text: the first finds what is there, the second encodes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pentameter.data.corpora.conversations import (
    ANSWERS,
    Chat,
    Conversation,
    Conversations,
    Exchange,
)
from pentameter.data.corpora.files import check_whole
from pentameter.data.corpora.text import utf8_size
from pentameter.data.prepare.splits import IS_BY_DOCUMENT, Splitting, split_ends, split_of
from pentameter.data.progress import AWAITING, ENCODING, READING, Progress
from pentameter.data.shards.format import SPLITS
from pentameter.data.shards.writer import SHARD_TOKENS, NewAnswers, ShardWriter
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chat import (
    CHATML,
    ChatTemplate,
    Segment,
    TemplateBoundsError,
    TemplateRefusalError,
    chosen_chat_template,
    disarmed,
    pieces_of,
    plain,
)
from pentameter.data.tokenizers.rendering import (
    Asked,
    Documents,
    Rendering,
    n_characters_of,
)
from pentameter.data.tokenizers.setting import build_tokenizer, chosen_tokenizer
from pentameter.disk.atomic import FolderExistsError, refuse_existing
from pentameter.disk.lock import building
from pentameter.errors import ConfigError, CorruptError, PentameterError, StorageError

BATCH_DOCUMENTS = 256
"""Documents that are encoded at once."""

BATCH_RENDERED, BATCH_CHARACTERS = 64, 1 << 20
"""Conversations that are rendered at once, and about their characters: of small ones many, as each
request to the process that renders takes a tenth of a millisecond."""

Records = Iterator[tuple[Conversation, str]]
"""Conversations, each with the place where it stands."""


@dataclass(frozen=True)
class Document:
    """A conversation as text, and which parts of it a model learns."""

    segments: Sequence[Segment]
    is_rendered: bool
    """By a template, which writes special tokens; what is not has the end of text behind it."""

    @property
    def text(self) -> str:
        """All of it, as a person reads it."""
        return plain("".join(text for text, _ in self.segments))

    def to_bytes(self) -> bytes:
        """Everything that decides its tokens, for a hash."""
        content = json.dumps([self.segments, self.is_rendered]).encode()
        return len(content).to_bytes(8, "little") + content


@dataclass(frozen=True)
class ConversationContents:
    """The documents of conversations: hash, number, size and splits, as one pass found them."""

    conversations: Conversations
    chat: ChatTemplate | None
    special_tokens: Mapping[str, int]
    sha256: str
    """sha256, in hex, of their segments."""
    splits: bytes
    """The place in SPLITS of each document."""
    n_bytes: int
    characters: str
    """The distinct characters, sorted, those held out beside too."""
    held_out: Mapping[str, ConversationContents] = field(default_factory=dict)

    def documents(self) -> Iterator[Document]:
        """A new pass over them."""
        return _documents(self.conversations, self.chat, self.special_tokens)

    def description(self) -> dict[str, Any]:
        """Hashes and sizes, for the header of shards."""
        sizes = {"sha256": self.sha256, "bytes": self.n_bytes, "conversations": len(self.splits)}
        held_out = {split: part.description() for split, part in self.held_out.items()}
        return {**sizes, **({"held_out": held_out} if held_out else {})}


def chat_template(setting: str | None, tokenizer: str | Tokenizer) -> ChatTemplate | None:
    """The template that `data.chat_template` names, else the tokenizer's own; None without one."""
    if setting is not None:
        return chosen_chat_template(setting)
    return None if isinstance(tokenizer, str) else tokenizer.chat


def read_conversations(
    conversations: Conversations,
    chat: ChatTemplate | None,
    tokenizer: str | Tokenizer,
    splitting: Splitting,
    *,
    progress: Progress | None = None,
) -> ConversationContents:
    """What conversations, and those held out beside them, become by a template.

    `tokenizer` is the one that will encode them, or a setting. Raises ConfigError where messages
    want a template and there is none, CorruptError for a record that is no conversation or that
    the template refuses, StorageError as reading does.
    """
    special = {} if isinstance(tokenizer, str) else tokenizer.special_tokens
    splitting = Splitting(0.0) if conversations.held_out else splitting
    found = _read(conversations, chat, special, splitting, progress)
    held_out = {}
    for split, other in conversations.held_out.items():
        part = _read(other, chat, special, Splitting(0.0), progress)
        held_out[split] = replace(part, splits=bytes([SPLITS.index(split)]) * len(part.splits))
    characters = {*found.characters}.union(*(part.characters for part in held_out.values()))
    return replace(found, characters="".join(sorted(characters)), held_out=held_out)


def _read(
    conversations: Conversations,
    chat: ChatTemplate | None,
    special_tokens: Mapping[str, int],
    splitting: Splitting,
    progress: Progress | None,
) -> ConversationContents:
    digest, characters = hashlib.sha256(), set[str]()
    fractions = splitting.validation_fraction, splitting.test_fraction
    n_bytes, splits = 0, bytearray()
    for document in _documents(conversations, chat, special_tokens):
        digest.update(document.to_bytes())
        text = document.text
        characters |= {*text}
        n_bytes += utf8_size(text)
        splits.append(split_of(hashlib.sha256(text.encode()).digest(), *fractions))
        if progress is not None:
            progress(READING, n_bytes, max(conversations.n_bytes, n_bytes))
    if not splits:
        raise ConfigError(f"there is no conversation in {conversations.files[0]}; nothing to learn")
    if not IS_BY_DOCUMENT[splitting.by]:
        ends = split_ends(len(splits), *fractions)
        counts = np.diff([0, *ends]).tolist()
        splits = bytearray(b"".join(bytes([place]) * n for place, n in enumerate(counts)))
    return ConversationContents(
        conversations,
        chat,
        special_tokens,
        digest.hexdigest(),
        bytes(splits),
        n_bytes,
        "".join(sorted(characters)),
    )


def _documents(
    conversations: Conversations, chat: ChatTemplate | None, special_tokens: Mapping[str, int]
) -> Iterator[Document]:
    n_bytes = 0
    for documents, where in _rendered(conversations.records(), chat, special_tokens):
        for document in documents:
            check_whole(text := document.text, "a message", where)
            n_bytes += utf8_size(text)
            if conversations.max_bytes is not None and n_bytes > conversations.max_bytes:
                return
            yield document


def _rendered(
    records: Records, chat: ChatTemplate | None, special_tokens: Mapping[str, int]
) -> Iterator[tuple[list[Document], str]]:
    """The documents of each conversation, and where it stands; CorruptError where the template
    refuses it."""
    with ExitStack() as stack:
        rendering: Rendering | None = None
        for batch in _batches(records):
            chats = [(each, where) for each, where in batch if isinstance(each, Chat)]
            if chats and rendering is None:
                rendering = stack.enter_context(Rendering(_needed(chat, where=chats[0][1])))
            found: Iterator[Documents | TemplateRefusalError] = iter(())
            if rendering is not None:
                asked = [_asked(each, where, special_tokens) for each, where in chats]
                try:
                    found = iter(rendering.documents(asked))
                except TemplateBoundsError as error:
                    raise CorruptError(f"{chats[0][1]}, or soon after: {error}") from error
            for conversation, where in batch:
                if isinstance(conversation, Exchange):
                    yield [_as_it_is(conversation)], where
                else:
                    yield _accepted(next(found), where), where


def _batches(records: Records) -> Iterator[list[tuple[Conversation, str]]]:
    """The conversations in lists of some, of bounded size; those before one that is damaged come
    before its error."""
    batch: list[tuple[Conversation, str]] = []
    n_characters = 0
    try:
        for conversation, where in records:
            batch.append((conversation, where))
            n_characters += n_characters_of(vars(conversation))
            if len(batch) == BATCH_RENDERED or n_characters > BATCH_CHARACTERS:
                yield batch
                batch, n_characters = [], 0
    except PentameterError:
        yield batch
        raise
    yield batch


def _needed(chat: ChatTemplate | None, where: str) -> ChatTemplate:
    if chat is None:
        raise ConfigError(
            f"{where} has messages, and the tokenizer no chat template that would make them text; "
            f"set data.chat_template (in prepare --chat-template): {CHATML!r}, a Jinja file, or a "
            "folder with the tokenizer_config.json of a Hugging Face model"
        )
    return chat


def _asked(chat: Chat, where: str, special_tokens: Mapping[str, int]) -> Asked:
    """A chat as the template is asked for it."""
    answers = [
        number
        for number, message in enumerate(chat.messages)
        if message["role"] == ANSWERS and number >= chat.n_given
    ]
    try:
        messages = disarmed(chat.messages, special_tokens)
        return Asked(messages, disarmed(chat.tools, special_tokens), answers)
    except TemplateRefusalError as error:
        raise CorruptError(f"{where}: {error}") from error


def _accepted(documents: Documents | TemplateRefusalError, where: str) -> list[Document]:
    """The documents that a template made; CorruptError where it refused, or left no answer."""
    if isinstance(documents, TemplateRefusalError):
        raise CorruptError(f"{where}: {documents}") from documents
    for segments in documents:
        if not any(is_learnt for _, is_learnt in segments):
            raise CorruptError(f"{where}: the chat template leaves nothing of the answers")
    return [Document(segments, True) for segments in documents]


def _as_it_is(exchange: Exchange) -> Document:
    segments = [(exchange.prompt, False), (exchange.completion, True)]
    return Document([segment for segment in segments if segment[0]], False)


def prepare_conversations(
    contents: ConversationContents,
    folder: Path,
    tokenizer: str | Tokenizer,
    *,
    progress: Progress | None = None,
    count_tokens: Callable[[int], None] | None = None,
    warnings: list[str] | None = None,
    shard_tokens: int = SHARD_TOKENS,
    keep_existing: bool = False,
) -> None:
    """Write the shards of conversations as a new folder, which appears whole or not at all.

    `tokenizer` is the one that `contents` were read for, or the same setting, which is made of the
    train split's text. The rest is as `from_text.prepare`, errors too.
    """
    if not keep_existing:
        refuse_existing(folder)
    wanted = chosen_tokenizer(tokenizer)
    parts = [contents, *contents.held_out.values()]
    n_bytes, n_done = sum(part.n_bytes for part in parts), 0
    tell = progress or (lambda stage, done, total: None)
    kept = [FolderExistsError] if keep_existing else []
    with suppress(*kept), building(folder, lambda: tell(AWAITING, 0, n_bytes)) as unfinished:
        used = _made(wanted, contents, warnings)
        name = contents.conversations.name
        with ShardWriter(unfinished, name, used, shard_tokens, has_answers=True) as writer:
            for part in parts:
                for n_bytes_more in _encode(part, used, writer):
                    n_done += n_bytes_more
                    tell(ENCODING, n_done, n_bytes)
                    if count_tokens is not None:
                        count_tokens(writer.n_tokens)
            writer.finish(contents.description())


def _made(
    wanted: str | Tokenizer, contents: ConversationContents, warnings: list[str] | None
) -> Tokenizer:
    """The tokenizer itself, or the one that the setting makes of the train split; with the chat
    template, which is then its own."""

    def train_texts() -> Iterator[str]:
        for document, split in zip(contents.documents(), contents.splits, strict=False):
            if split == 0:
                yield document.text

    if isinstance(wanted, str):
        wanted = (
            CharTokenizer(contents.characters)
            if wanted == "char"
            else build_tokenizer(wanted, train_texts, warnings=warnings)
        )
    wanted.chat = contents.chat or wanted.chat
    return wanted


def _encode(
    contents: ConversationContents, tokenizer: Tokenizer, writer: ShardWriter
) -> Iterator[int]:
    """Write the documents' tokens; yields the bytes of text of some after others.

    Raises StorageError if the files are not those of the first pass.
    """
    digest, n_documents = hashlib.sha256(), 0
    documents = contents.documents()
    while batch := list(itertools.islice(documents, BATCH_DOCUMENTS)):
        pieces = [
            (number, piece, is_learnt)
            for number, document in enumerate(batch)
            for text, is_learnt in document.segments
            for piece in _pieces(document, text, contents.special_tokens)
        ]
        texts = [piece for _, piece, _ in pieces if isinstance(piece, str)]
        encoded = iter(tokenizer.encode_batch(texts))
        parts: list[list[np.ndarray]] = [[] for _ in batch]
        masks: list[list[np.ndarray]] = [[] for _ in batch]
        for number, piece, is_learnt in pieces:
            ids = next(encoded) if isinstance(piece, str) else np.array([piece])
            parts[number].append(ids)
            masks[number].append(np.full(len(ids), is_learnt))
        for number, document in enumerate(batch):
            digest.update(document.to_bytes())
            if n_documents == len(contents.splits):
                break
            if not document.is_rendered and tokenizer.end_of_text is not None:
                parts[number].append(np.array([tokenizer.end_of_text]))
                masks[number].append(np.array([True]))
            split = SPLITS[contents.splits[n_documents]]
            ids = np.concatenate(parts[number])
            learnt = "".join(text for text, is_learnt in document.segments if is_learnt)
            answers = NewAnswers(runs(np.concatenate(masks[number])), utf8_size(plain(learnt)))
            n_documents += 1
            if len(ids):
                writer.write(split, ids, utf8_size(document.text), [0], answers)
        yield sum(utf8_size(document.text) for document in batch)
    if digest.hexdigest() != contents.sha256:
        raise StorageError(
            f"the conversations in {contents.conversations.files[0]} changed while they were read; "
            "start again"
        )


def _pieces(document: Document, text: str, special_tokens: Mapping[str, int]) -> list[str | int]:
    """A segment's special tokens, where a template wrote it, and the texts between them."""
    return pieces_of(text, special_tokens) if document.is_rendered else [text]


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Where each run of true values starts and stops."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
