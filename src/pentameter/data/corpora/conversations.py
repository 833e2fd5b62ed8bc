"""Conversations in JSONL or tables: records with `messages`, or with `prompt` and `completion`.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}
    {"prompt": "2 + 2 =", "completion": " 4"}
    {"prompt": [{"role": "user", …}], "completion": [{"role": "assistant", …}]}

Messages have the forms of OpenAI's interface (`data/messages.py`). A model learns the assistant's
messages in `messages`, and all of `completion`. The texts become tokens in
`prepare/from_conversations.py`, by the tokenizer's chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pentameter.data.corpora.files import FileContents, InputFile, check_encodable, is_jsonl
from pentameter.data.corpora.tables import is_table
from pentameter.data.corpora.text import Corpus
from pentameter.data.messages import normalized, normalized_tools, normalized_variables
from pentameter.errors import ConfigError, CorruptError

ASSISTANT = "assistant"
"""Role of the messages that a model learns to write."""

FIELDS = (
    *("messages", "conversations", "prompt", "completion"),
    *("tools", "functions", "chat_template_kwargs"),
)
"""Fields of a record that are read from tables for conversations."""


@dataclass(frozen=True)
class Exchange:
    """A prompt and its completion, both plain text, without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """A list of messages with roles, to be rendered by a chat template."""

    messages: Sequence[Mapping[str, Any]]
    targets: Sequence[int]
    """Indices of the assistant messages that a model learns to write."""
    tools: Sequence[Any] | None
    """Functions that the model may call, as chat templates take them; None if the record has
    none."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""


Conversation = Exchange | Chat


@dataclass(frozen=True)
class Conversations(Corpus):
    """A corpus of conversations in JSONL files or tables."""

    def records(self) -> Iterator[tuple[Conversation, str]]:
        """Yield each conversation with its place for messages, its file and line or row. A file is
        read when its first record is asked for.

        Raises CorruptError for a record that is no conversation or not JSON, StorageError for a
        file that cannot be read.
        """
        for file in self.files:
            for record, where in file.records(self.contents, FIELDS):
                yield _conversation(record, where), where


def hold_conversations(files: Sequence[InputFile], contents: FileContents) -> bool:
    """Return whether files hold conversations: all are JSONL or tables by their names, and the
    first record has `messages`, `conversations`, or `prompt` and `completion`, and lacks the text
    field that `contents` names. Raises StorageError for unreadable files, CorruptError for damaged
    ones."""
    if not hold_records(files):
        return False
    for file in files:
        for record, _ in file.records(contents, FIELDS):
            is_one = any(
                keys <= record.keys()
                for keys in ({"messages"}, {"conversations"}, {"prompt", "completion"})
            )
            return is_one and contents.text_field not in record
    return False


def hold_records(files: Sequence[InputFile]) -> bool:
    """Return True if all files are JSONL or tables, by their names."""
    return all(is_jsonl(file.name) or is_table(file.name) for file in files)


def _conversation(record: Mapping[str, Any], where: str) -> Conversation:
    """Return a JSONL or table record as a Chat, or as an Exchange if `prompt` and `completion` are
    plain texts. Raises CorruptError, at `where`, for a record that is neither."""
    prompt, completion = record.get("prompt"), record.get("completion")
    for key in ("messages", "conversations"):
        if key in record:
            return _chat(record[key], [], record, where)
    if isinstance(prompt, list) and isinstance(completion, list):
        return _chat(completion, prompt, record, where)
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


def _chat(messages: Any, given: list[Any], record: Mapping[str, Any], where: str) -> Chat:
    """Check the messages of a conversation, and return them as a Chat. Raises CorruptError, naming
    `where`, for invalid messages, or if a model would learn none of them.

    messages: the conversation's own messages. A model learns the assistant's, unless their `weight`
        is 0 or their `train` is false.
    given: messages before these, a prompt's, which are never learned.
    record: the record that they come from, with tools and further variables of the template.
    """
    tools = record.get("tools")
    if tools is None and isinstance(functions := record.get("functions"), list):  # the older form
        tools = [{"type": "function", "function": each} for each in functions]
    try:
        whole = normalized([*given, *messages] if isinstance(messages, list) else messages)
        tools = normalized_tools(tools)
        variables = normalized_variables(record.get("chat_template_kwargs"))
    except ConfigError as error:
        raise CorruptError(f"{where}: {error}") from error
    for number, message in enumerate(whole):
        if message.get("weight", 1) not in (0, 1):
            raise CorruptError(
                f"{where}: message {number} has weight={message['weight']!r:.20}; an answer is "
                "learned (1) or only read (0)"
            )
    # OpenAI's way and axolotl's to say that an answer is only read.
    is_learned = [each.get("weight", 1) and each.get("train", True) for each in whole]
    targets = [
        n for n in range(len(given), len(whole)) if whole[n]["role"] == ASSISTANT and is_learned[n]
    ]
    if not targets:
        raise CorruptError(
            f"{where}: no message of role {ASSISTANT!r}, so there is nothing to learn; leave the "
            "record out"
        )
    return Chat(whole, targets, tools, variables)
