"""Conversations in JSONL: records with `messages`, or with `prompt` and `completion`.

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
from pentameter.config.naming import name_of
from pentameter.data.corpora.files import (
    FileContents,
    check_encodable,
    estimated_bytes,
    is_jsonl,
    read_records,
)
from pentameter.data.corpora.text import files_below
from pentameter.errors import CorruptError

ASSISTANT = "assistant"
"""Role of the messages that a model learns to write."""


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
    """JSONL files with conversations, read one after another."""

    name: str
    """A name as `config/naming.py` allows; names the prepared files."""
    files: tuple[Path, ...]
    contents: FileContents
    max_bytes: int | None = None
    """Maximum UTF-8 bytes of text to take; None for all."""
    held_out: Mapping[str, Conversations] = field(default_factory=dict)
    """`val` and `test`, if they are files themselves."""

    @property
    def n_bytes(self) -> int:
        """Approximate bytes that a pass reads; for progress only."""
        return sum(map(estimated_bytes, self.files))

    def records(self) -> Iterator[tuple[Conversation, str]]:
        """Yield each conversation with its file and line.

        Raises CorruptError for a record that is no conversation, and as `read_records` does.
        """
        for file in self.files:
            for record, where in read_records(file, self.contents):
                yield _conversation(record, where), where


def conversations_at(data: DataConfig, paths: Sequence[Path]) -> Conversations | None:
    """Open the conversations in files and folders, with those that `data` holds out beside them.

    None unless all are JSONL files and the first record is a conversation without the field
    `data.text_field`. Raises StorageError for unreadable files, CorruptError for damaged ones.
    """
    contents = FileContents(data.encoding, data.text_field)
    files = _jsonl_files(paths)
    if not files or not _begins_with_conversation(files, contents):
        return None
    name = name_of(paths[0].absolute().stem)
    held_out = {}
    for split, path in (("val", data.validation_path), ("test", data.test_path)):
        if path is None:
            continue
        if not (inside := _jsonl_files([Path(path)])):
            raise CorruptError(
                f"{path} holds no conversations, as {files[0]} does: .jsonl files are expected"
            )
        held_out[split] = Conversations(f"{name}-{split}", inside, contents)
    found = Conversations(name, files, contents, data.max_bytes)
    return replace(found, held_out=held_out)


def _jsonl_files(paths: Sequence[Path]) -> tuple[Path, ...]:
    """List the files at the paths; empty unless every one is JSONL."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += files_below(path)
        elif path.is_file():
            files.append(path)
        else:
            return ()
    return tuple(files) if all(map(is_jsonl, files)) else ()


def _begins_with_conversation(files: Sequence[Path], contents: FileContents) -> bool:
    for file in files:
        for record, _ in read_records(file, contents):
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
