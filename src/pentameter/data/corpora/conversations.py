"""Conversations in JSONL or tables: records with `messages`, or with `prompt` and `completion`.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2 + 2 =", "completion": " 4"}
    {"prompt": [{"role": "user", …}], "completion": [{"role": "assistant", …}]}

A model learns the assistant's messages in `messages`, and all of `completion`. The texts become
tokens in `prepare/from_conversations.py`, by the tokenizer's chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pentameter.config.data_schema import DataConfig
from pentameter.data.corpora.files import (
    FileContents,
    check_encodable,
    holds_records,
    read_records,
)
from pentameter.data.corpora.inputs import (
    InputFile,
    input_bytes,
    input_name,
    inputs_at,
    local_path,
)
from pentameter.errors import CorruptError

ASSISTANT = "assistant"
"""Role of the messages that a model learns to write."""

FIELDS = ("messages", "prompt", "completion", "tools")
"""Fields of a record that make it a conversation."""


@dataclass(frozen=True)
class Exchange:
    """A prompt and its completion, both plain text."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """Messages by role, for a chat template."""

    messages: Sequence[Mapping[str, Any]]
    targets: Sequence[int]
    """Indices of the assistant messages that a model learns."""
    tools: Sequence[Any] | None
    """Functions that the model may call, as templates take them."""


Conversation = Exchange | Chat


@dataclass(frozen=True)
class Conversations:
    """JSONL files or tables with conversations, read one after another."""

    name: str
    """A name as `config/naming.py` allows; names the prepared files."""
    files: tuple[InputFile, ...]
    contents: FileContents
    max_bytes: int | None = None
    """Maximum UTF-8 bytes of text to take; None for all."""
    held_out: Mapping[str, Conversations] = field(default_factory=dict)
    """`val` and `test`, if they are files themselves."""
    warnings: tuple[str, ...] = ()
    """Warnings about the files, for the user."""

    @property
    def n_bytes(self) -> int:
        """Approximate bytes that a pass reads; for progress only."""
        return sum(map(input_bytes, self.files))

    def records(self) -> Iterator[tuple[Conversation, str]]:
        """Yield each conversation with its file and line.

        Raises CorruptError for a record that is no conversation, and as `read_records` does.
        """
        for file in self.files:
            for record, where in read_records(local_path(file), self.contents, FIELDS):
                yield _conversation(record, where), where


def conversations_at(data: DataConfig, paths: Sequence[str | Path]) -> Conversations | None:
    """Open the conversations at paths (see `inputs_at`), with those that `data` holds out beside
    them, or else those that the files' names do.

    None unless all are JSONL files or tables and the first record is a conversation without the
    field `data.text_field`. Raises ConfigError for a path that does not exist, StorageError for
    unreadable files, CorruptError for damaged ones.
    """
    contents = FileContents(data.encoding, data.text_field)
    inputs = inputs_at(paths)
    files = inputs.files
    if not _hold_records(files) or not _begins_with_conversation(files, contents):
        return None
    name = input_name(paths[0])
    given = {"val": data.validation_path, "test": data.test_path}
    beside = {split: inputs_at([path]).files for split, path in given.items() if path is not None}
    for split, inside in beside.items():
        if not _hold_records(inside):
            raise CorruptError(
                f"{given[split]} holds no conversations, as {files[0]} does: .jsonl files or "
                "tables are expected"
            )
    held_out = {
        split: Conversations(f"{name}-{split}", inside, contents)
        for split, inside in (beside or inputs.held_out).items()
    }
    found = Conversations(name, files, contents, data.max_bytes, warnings=inputs.warnings)
    return replace(found, held_out=held_out)


def _hold_records(files: Sequence[InputFile]) -> bool:
    return all(holds_records(file.name) for file in files)


def _begins_with_conversation(files: Sequence[InputFile], contents: FileContents) -> bool:
    for file in files:
        for record, _ in read_records(local_path(file), contents, FIELDS):
            if contents.text_field in record:
                return False
            return "messages" in record or {"prompt", "completion"} <= record.keys()
    return False


def _conversation(record: Mapping[str, Any], where: str) -> Conversation:
    if "messages" in record:
        return _chat(record["messages"], [], record.get("tools"), where)
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return _chat(completion, prompt, record.get("tools"), where)
    if isinstance(prompt, str) and isinstance(completion, str):
        for key, text in (("prompt", prompt), ("completion", completion)):
            check_encodable(text, f"{key!r}", where)
        if not completion:
            raise CorruptError(f"{where}: 'completion' is empty; there is nothing to learn")
        return Exchange(prompt, completion)
    raise CorruptError(
        f"{where} is no conversation (its keys are {sorted(record)}): 'messages' is expected, a "
        "list, or 'prompt' and 'completion', two texts or two lists of messages"
    )


def _chat(messages: Any, given: list[Any], tools: Any, where: str) -> Chat:
    """Check messages and build a chat whose `given` messages come first and are not learned."""
    if not isinstance(messages, list):
        raise CorruptError(f"{where}: 'messages' is {type(messages).__name__}, not a list")
    if tools is not None and not isinstance(tools, list):
        raise CorruptError(f"{where}: 'tools' is {type(tools).__name__}, not a list")
    whole = [*given, *messages]
    for number, message in enumerate(whole):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise CorruptError(
                f"{where}: message {number} is {message!r:.60}, not an object with a 'role'"
            )
        if message.get("weight", 1) != 1:
            raise CorruptError(
                f"{where}: message {number} has weight={message['weight']!r:.20}; every answer "
                "counts the same here: leave it out, or give what is not to be learned as 'prompt'"
            )
    targets = [n for n, each in enumerate(whole) if each["role"] == ASSISTANT and n >= len(given)]
    if not targets:
        raise CorruptError(
            f"{where}: no message of role {ASSISTANT!r}, so there is nothing to learn; leave the "
            "record out"
        )
    return Chat(whole, targets, tools)
