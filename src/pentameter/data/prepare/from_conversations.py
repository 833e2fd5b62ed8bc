"""Conversations into token shards, with the loss mask: a model learns the assistant tokens alone.

Messages become text by the tokenizer's chat template; prompt and completion stay as they are,
followed by the end of text. Each text is encoded whole, as transformers does, and a token is
learned if one of its characters is in an answer. A conversation lies in one split, chosen by its
position or by the hash of its text. There are two passes, as over text: the first counts and
hashes, the second encodes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from pentameter.config.choices import TEMPLATE_DATE
from pentameter.data.corpora.conversations import Chat, Conversation, Conversations, Exchange
from pentameter.data.corpora.files import check_encodable
from pentameter.data.corpora.records.rows import BadRowError, RowsRead
from pentameter.data.corpora.text import utf8_size
from pentameter.data.prepare.preparation import Contents, Preparation
from pentameter.data.prepare.splits import IS_BY_DOCUMENT, Splitting
from pentameter.data.progress import READING
from pentameter.data.shards.format import ENCODED_WHOLE, SPLITS
from pentameter.data.shards.writer import ShardWriter
from pentameter.data.tokenizers.base import Ids, Mask, Tokenizer
from pentameter.data.tokenizers.chat import (
    CHATML,
    ChatTemplate,
    Segment,
    TemplateBoundsError,
    TemplateRefusalError,
    escaped,
    unescaped,
)
from pentameter.data.tokenizers.chunking import batches
from pentameter.data.tokenizers.render_client import Rendering, prompt_of_answers, prompt_remark
from pentameter.data.tokenizers.renderer import Documents, RenderRequest, n_characters_of
from pentameter.data.tokenizers.template_forms import QUESTION
from pentameter.errors import ConfigError, CorruptError, StorageError

BATCH_DOCUMENTS = 256
"""Number of documents encoded at once."""

BATCH_RENDERED, BATCH_CHARACTERS = 64, 1 << 20
"""Maximum conversations, and maximum characters, rendered in one request, which alone takes a tenth
of a millisecond."""

Asked = tuple[Conversation, RenderRequest | None, str]
"""A conversation, the request to render it, and its file and line for messages ("FILE, line 3")."""


@dataclass(frozen=True)
class Document:
    """The text of a conversation, or of a part of it, as a list of segments; a model either learns
    a segment or only reads it."""

    segments: Sequence[Segment]
    is_rendered: bool
    """True if a chat template wrote the text, special tokens included; otherwise the end of text is
    added."""

    @property
    def text(self) -> str:
        """The whole text, for people, without the marks in escaped special tokens."""
        return unescaped("".join(text for text, _ in self.segments))

    def to_bytes(self) -> bytes:
        """Return everything that decides the document's tokens as bytes, for a hash."""
        content = json.dumps([self.segments, self.is_rendered]).encode()
        return len(content).to_bytes(8, "little") + content


class Remarks:
    """Collects warnings about a chat template: that it leaves out parts of conversations, or that
    the answers in its text do not begin with the prompt by which it asks a model for an answer."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, int]] = {}
        self._prompts: dict[bool, str] = {}

    def add(
        self, chat: Chat, documents: Sequence[Document], where: str, rendering: Rendering, date: str
    ) -> None:
        """Compare a chat with the text that its template made of it, and count the parts that are
        missing.

        chat: the chat.
        documents: what the template made of it.
        where: its file and line, for the warnings.
        rendering: renders by the template.
        date: the day that the template is told.
        """
        learned = "".join(
            text for each in documents for text, is_target in each.segments if is_target
        )
        learned, whole = unescaped(learned), documents[-1].text
        answers = [chat.messages[number] for number in chat.targets]
        calls = [call for each in answers for call in each.get("tool_calls") or []]
        reasons = re.findall(r"\A\W*(\w[\w ]{0,30})", str(answers[-1].get("reasoning_content", "")))
        self._note("`tools`", _names(chat.tools or []), whole, where)
        self._note("`tool_calls` of answers", _names(calls), learned, where)
        self._note("reasoning", reasons, learned, where)
        if (has_tools := chat.tools is not None) not in self._prompts:
            asked = RenderRequest([QUESTION], chat.tools, date=date)
            self._prompts[has_tools] = prompt_of_answers(rendering.text, asked)
        prompt = self._prompts[has_tools]
        for document in documents:
            n_before = [is_target for _, is_target in document.segments].index(True)
            before = "".join(text for text, _ in document.segments[:n_before])
            around = before[-len(prompt) :] + document.segments[n_before][0][: len(prompt)]
            self._note(prompt, [prompt], around, where)

    def _note(self, what: str, texts: Sequence[str], written: str, where: str) -> None:
        """Count one case in which the template left something out: `texts`, parts of the chat at
        `where`, is not empty and none of them occurs in `written`, the text that the template made.
        `what` names the parts in the warning."""
        if texts and not any(text in written for text in texts):
            first, n = self._found.get(what, (where, 0))
            self._found[what] = first, n + 1

    def sentences(self, chat: ChatTemplate) -> list[str]:
        """Return a warning for each thing that was missing."""
        said = []
        for what, (where, n) in self._found.items():
            first = f"{n:,} time{'s' if n > 1 else ''} (first in {where})"
            said.append(
                prompt_remark(chat, what, f"answers, {first},")
                if what in self._prompts.values()
                else f"{chat.origin} writes nothing of the {what} in conversations, {first}: the "
                "model does not see it; name a template that does with data.chat_template"
            )
        return said


def _names(functions: Sequence[Any]) -> list[str]:
    """Return the names in a list of tools or tool calls, in OpenAI's form; entries without one are
    left out."""
    inner = [each.get("function", each) for each in functions if isinstance(each, Mapping)]
    names = [each.get("name") for each in inner if isinstance(each, Mapping)]
    return [name for name in names if isinstance(name, str)]


@dataclass(frozen=True)
class _Source:
    """Conversations, with the template and settings that turn them into documents."""

    conversations: Conversations
    chat: ChatTemplate | None
    """The template that renders messages; None only if no record has any."""
    special_texts: Sequence[str]
    """Texts of the tokenizer's special tokens, which text in a message never becomes."""
    date: str
    """The day that the template is told."""

    def documents(
        self, rows: RowsRead | None = None, remarks: Remarks | None = None
    ) -> Iterator[list[Document]]:
        """Yield each conversation's documents, at least one, until `max_bytes` of text are read; a
        document that would exceed them is left out.

        rows: counts the rows, and takes those that cannot be used; None: as the conversations'
        `bad_rows` says. remarks: collects warnings about the template; None collects none.

        Raises ConfigError for messages without a template; CorruptError for a damaged file, and for
        a row that is no conversation, or that the template refuses, unless such are left out.
        """
        rows = RowsRead(self.conversations.contents.bad_rows) if rows is None else rows
        n_bytes, most_bytes = 0, self.conversations.max_bytes
        for documents, form in self._rendered(rows, remarks):
            for number, document in enumerate(documents):
                n_bytes += utf8_size(document.text)
                if most_bytes is not None and n_bytes > most_bytes:
                    if number:
                        rows.forms[form] += 1
                        yield documents[:number]
                    return
            rows.forms[form] += 1
            yield documents

    def _rendered(
        self, rows: RowsRead, remarks: Remarks | None
    ) -> Iterator[tuple[list[Document], str]]:
        """Yield, for each conversation, its documents with what its form is called: one document
        for a prompt and completion, one or more for messages. `rows` takes those that the template
        refuses. Raises ConfigError for messages without a template."""
        with ExitStack() as stack:
            rendering: Rendering | None = None
            for batch in _batches(self._asked(rows)):
                chats = [(asked, where) for _, asked, where in batch if asked is not None]
                if chats and rendering is None:
                    if self.chat is None:
                        raise ConfigError(
                            f"{chats[0][1]} has messages, and the tokenizer no chat template that "
                            "would make them text; set data.chat_template (in prepare "
                            f"--chat-template): {CHATML!r}, a Jinja file, or a folder with the "
                            "tokenizer_config.json of a Hugging Face model"
                        )
                    rendering = stack.enter_context(Rendering(self.chat))
                found: Iterator[Documents | TemplateRefusalError] = iter(())
                if rendering is not None:
                    try:
                        found = iter(rendering.documents([asked for asked, _ in chats]))
                    except TemplateBoundsError as error:
                        raise CorruptError(f"{chats[0][1]}, or soon after: {error}") from error
                for conversation, _, where in batch:
                    if isinstance(conversation, Exchange):
                        segments = [(conversation.prompt, False), (conversation.completion, True)]
                        documents = [Document([each for each in segments if each[0]], False)]
                        yield documents, conversation.form
                        continue
                    try:
                        documents = _accepted(next(found), where)
                    except BadRowError as error:
                        rows.leave_out(error)
                        continue
                    if remarks is not None and rendering is not None:
                        remarks.add(conversation, documents, where, rendering, self.date)
                    yield documents, conversation.form

    def _asked(self, rows: RowsRead) -> Iterator[Asked]:
        """Yield each conversation with the request to render it, in which special tokens in its
        texts are escaped; None for a prompt and completion. `rows` takes those with reserved
        characters in their texts."""
        for conversation, where in self.conversations.records(rows):
            if isinstance(conversation, Exchange):
                yield conversation, None, where
                continue
            try:
                messages, tools, variables = (
                    escaped(each, self.special_texts)
                    for each in (conversation.messages, conversation.tools, conversation.variables)
                )
            except TemplateRefusalError as error:
                rows.leave_out(BadRowError(f"{where}: {error}"))
                continue
            targets = conversation.targets
            asked = RenderRequest(messages, tools, targets, date=self.date, variables=variables)
            yield conversation, asked, where


@dataclass(frozen=True, kw_only=True)
class ConversationContents(Contents):
    """Contents of a corpus of conversations, found in the first pass; the hash covers all
    documents' segments."""

    kind = "conversations"
    has_loss_mask = True

    source: _Source
    rows: RowsRead
    """The rows that were read."""
    splits: bytes
    """One byte per document: its split's index in SPLITS."""
    has_several: bool
    """True if a conversation is several documents, as with templates that rewrite earlier turns,
    and the corpus has several splits."""

    @property
    def key(self) -> dict[str, Any]:
        """JSON values that identify the conversations in the cache.

        The template is included because it is stored with the tokenizer. The other entries tell
        what earlier versions did otherwise: they gave a tokenizer made from conversations no
        special tokens, put the documents of one conversation into several splits, and encoded
        prompt and answer apart.
        """
        chat = None if self.chat is None else self.chat.to_json()
        split = {"split": "conversations"} if self.has_several else {}
        special = [*self.source.special_texts]
        return {**super().key, "chat": chat, "special": special, **split, **ENCODED_WHOLE}

    def count(self) -> dict[str, int]:
        """Return the corpus's size as a dict with one entry: the unit's name and the number of
        conversations or documents."""
        return {"conversations": len(self.splits)}

    def documents(self) -> Iterator[Document]:
        """Start a new pass over the documents, which reads the files and renders the messages
        again."""
        return itertools.chain.from_iterable(self.source.documents())

    def train_texts(self, tokenizer: str) -> Iterator[tuple[str, int]]:
        """Yield each document's text (an empty string if it is not in train) with the UTF-8 bytes
        read so far; `tokenizer` is unused."""
        n_done = 0
        for document, split in zip(self.documents(), self.splits, strict=False):
            n_done += utf8_size(document.text)
            yield document.text if split == 0 else "", n_done

    def encode(self, tokenizer: Tokenizer, writer: ShardWriter) -> Iterator[int]:
        """Write the tokens and loss masks of this corpus and those held out; yield the UTF-8 bytes
        of text done so far after each batch. Raises StorageError if files have changed since the
        first pass."""
        n_done = 0
        for part in self.parts:
            for n_bytes in _encode(part, tokenizer, writer):
                n_done += n_bytes
                yield n_done


@dataclass(frozen=True)
class ConversationPreparation(Preparation):
    """Conversations on their way to shards, split by position, or by the hash of each one's text.
    If a conversation becomes several documents, each a longer part of it, all lie in one split."""

    corpus: Conversations
    chat: ChatTemplate | None = None
    """The template that renders messages; None if the tokenizer has none, which suffices for
    prompts and completions."""
    date: str = TEMPLATE_DATE
    """The day that the template is told, YYYY-MM-DD."""

    @property
    def holds(self) -> str:
        """How many conversations the corpus has, and in which forms, in words."""
        assert isinstance(self.contents, ConversationContents)  # as `_read` makes them
        return self.contents.rows.used

    def _read(self, corpus: Conversations, split: str, splitting: Splitting) -> Contents:
        digest, characters = hashlib.sha256(), set[str]()
        n_bytes, n_documents, splits = 0, list[int](), list[int]()  # of each conversation
        rows, remarks = RowsRead(corpus.contents.bad_rows), Remarks()
        source = _Source(corpus, self.chat, self.special_texts, self.date)
        for documents in source.documents(rows, remarks):
            for document in documents:
                digest.update(document.to_bytes())
                text = document.text
                characters |= {*text}
                n_bytes += utf8_size(text)
            n_documents.append(len(documents))  # of which the last is the whole conversation
            splits.append(splitting.split_of(hashlib.sha256(text.encode()).digest()))
            self.progress(READING, n_bytes, max(corpus.n_bytes, n_bytes))
        if not splits:
            left_out = f": {rows.first_left_out}" if rows.n_left_out else ""
            raise ConfigError(
                f"there is no conversation in {corpus.files[0]}; nothing to learn{left_out}"
            )
        if split != "train":
            splits = [SPLITS.index(split)] * len(splits)
        elif not IS_BY_DOCUMENT[splitting.by]:
            counts = np.diff([0, *splitting.ends(len(splits))])
            splits = np.repeat(np.arange(3), counts).tolist()
        return ConversationContents(
            name=corpus.name,
            sha256=digest.hexdigest(),
            n_bytes=n_bytes,
            own_characters="".join(characters),
            chat=self.chat,
            source=source,
            splits=np.repeat(np.array(splits, np.uint8), n_documents).tobytes(),
            rows=rows,
            remarks=[
                *rows.warnings(len(n_documents)),
                *([] if self.chat is None else remarks.sentences(self.chat)),
            ],
            has_several=max(n_documents) > 1 and len(set(splits)) > 1,
        )


def _batches(records: Iterator[Asked]) -> Iterator[list[Asked]]:
    """Yield conversations in lists, each with at most BATCH_RENDERED of them and about
    BATCH_CHARACTERS characters."""
    least = BATCH_CHARACTERS // BATCH_RENDERED  # what a conversation counts, so that as many do
    return batches(
        records, BATCH_CHARACTERS, lambda each: max(least, n_characters_of(vars(each[0])))
    )


def _accepted(documents: Documents | TemplateRefusalError, where: str) -> list[Document]:
    """Return the documents that a template made of a chat. Raises BadRowError if the template
    refused the chat, or left none of its answers in the text, or half a surrogate pair. `where` is
    the chat's file and line."""
    if isinstance(documents, TemplateRefusalError):
        raise BadRowError(f"{where}: {documents}") from documents
    for segments in documents:
        if not any(is_target for _, is_target in segments):
            raise BadRowError(f"{where}: the chat template leaves nothing of the answers")
    made = [Document(segments, True) for segments in documents]
    for document in made:
        check_encodable(document.text, "a message", where)
    return made


def _tokens(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[tuple[Ids, Mask]]:
    """Yield each document's token ids and loss mask, both (n_tokens,). A document that no template
    rendered begins with the tokenizer's prefix, not learned, and ends with its end of text,
    learned."""
    prefix = np.array(tokenizer.prefix, np.int64)
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], np.int64)
    for is_rendered, several in itertools.groupby(documents, lambda each: each.is_rendered):
        segments = [each.segments for each in several]
        for ids, mask in tokenizer.encode_segments(segments, is_rendered=is_rendered):
            if is_rendered:
                yield ids, mask
            else:
                unlearned = np.zeros(len(prefix), dtype=bool)
                learned = np.ones(len(end), dtype=bool)
                yield np.concatenate([prefix, ids, end]), np.concatenate([unlearned, mask, learned])


def _encode(
    contents: ConversationContents, tokenizer: Tokenizer, writer: ShardWriter
) -> Iterator[int]:
    """Write the tokens and loss masks of one corpus, `contents`, through `writer`; yield the UTF-8
    bytes of text in each batch.

    Raises StorageError if the files differ from the first pass.
    """
    digest, n_documents = hashlib.sha256(), 0
    documents = contents.documents()
    while batch := list(itertools.islice(documents, BATCH_DOCUMENTS)):
        for document, (ids, mask) in zip(batch, _tokens(batch, tokenizer), strict=True):
            digest.update(document.to_bytes())
            if n_documents == len(contents.splits):
                break
            split = SPLITS[contents.splits[n_documents]]
            learned = "".join(text for text, is_target in document.segments if is_target)
            n_documents += 1
            if len(ids):
                n_target_bytes = utf8_size(unescaped(learned))
                writer.write(split, ids, utf8_size(document.text), [0], mask, n_target_bytes)
        yield sum(utf8_size(document.text) for document in batch)
    if digest.hexdigest() != contents.sha256:
        raise StorageError(
            f"the conversations in {contents.source.conversations.files[0]} changed while they "
            "were read; start again"
        )
