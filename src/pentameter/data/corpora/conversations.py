"""Conversations in JSONL, JSON arrays or tables: records in one of the forms of
`records/forms.toml`.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}
    {"instruction": "Add.", "input": "2 + 2", "output": "4"}
    {"prompt": "2 + 2 =", "completion": " 4"}

Messages have the forms of OpenAI's interface (`data/messages.py`). A model learns the assistant's
messages, and all of `completion`. The texts become tokens in `prepare/from_conversations.py`, by
the tokenizer's chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pentameter.data.corpora.files import check_encodable
from pentameter.data.corpora.records.forms import (
    AUTO,
    Form,
    form_of,
    messages_of,
    missing_key,
    record_fields,
)
from pentameter.data.corpora.records.rows import BadRowError, RowsRead
from pentameter.data.corpora.text import Corpus
from pentameter.data.messages import normalized, normalized_tools, normalized_variables
from pentameter.errors import ConfigError

ASSISTANT = "assistant"
"""Role of the messages that a model learns to write."""


@dataclass(frozen=True)
class Exchange:
    """A prompt and its completion, both plain text, without a chat template."""

    prompt: str
    completion: str
    form: str = field(default="", compare=False)
    """The name of its record's form."""


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
    form: str = field(default="", compare=False)
    """The name of its record's form."""


Conversation = Exchange | Chat


@dataclass(frozen=True)
class Conversations(Corpus):
    """A corpus of conversations in files of records."""

    def records(self, rows: RowsRead | None = None) -> Iterator[tuple[Conversation, str]]:
        """Yield each conversation with its place for messages, its file and line or row. A file is
        read when its first record is asked for.

        rows: takes the rows that are no conversations; None: as `contents.bad_rows` says.

        Raises CorruptError for a damaged file, and for a row that is no conversation unless such
        rows are left out; StorageError for a file that cannot be read.
        """
        rows = RowsRead(self.contents.bad_rows) if rows is None else rows
        for file in self.files:
            for row, where in file.records(self.contents, record_fields()):
                try:
                    if isinstance(row, BadRowError):
                        raise row
                    conversation = _conversation(row, self.contents.form, where)
                except BadRowError as error:
                    rows.leave_out(error)
                else:
                    yield conversation, where


def _conversation(record: Mapping[str, Any], chosen: str, where: str) -> Conversation:
    """Return a record as a Chat, or as an Exchange if its form is a pair of texts that stay plain.
    `chosen` is `data.form`. Raises BadRowError, at `where`, for one that has no form, or something
    else than its form says."""
    keys = [key for key, value in record.items() if value is not None]
    form = form_of(keys, chosen, where)
    if form is None:
        expected = "any form" if chosen == AUTO else f"the form {chosen!r}"
        missing = missing_key(keys, chosen)
        why = f"and {missing} is missing" if missing else f"not those of {expected}"
        raise BadRowError(f"{where} is no conversation: its keys are {sorted(keys)}, {why}")
    if form.is_plain and isinstance(record[form.answer], str):
        return _exchange(record, form, where)
    try:
        return _chat(record, form, where)
    except ConfigError as error:
        raise BadRowError(f"{where}: {error}") from error


def _exchange(record: Mapping[str, Any], form: Form, where: str) -> Exchange:
    """Return a prompt and its completion, a text, as they are. Raises BadRowError, at `where`, for
    a prompt that is no text, and for an empty completion."""
    key = form.asked[0]
    prompt, completion = record[key], record[form.answer]
    if not isinstance(prompt, str):
        raise BadRowError(
            f"{where}: {key!r} is {type(prompt).__name__}, and {form.answer!r} a text; write two "
            "texts, or two lists of messages"
        )
    check_encodable(prompt, f"{key!r}", where)
    check_encodable(completion, f"{form.answer!r}", where)
    if not completion:
        raise BadRowError(f"{where}: {form.answer!r} is empty; there is nothing to learn")
    return Exchange(prompt, completion, form.said)


def _chat(record: Mapping[str, Any], form: Form, where: str) -> Chat:
    """Return the messages of a conversation, checked, as a Chat. A model learns the assistant's,
    unless they are a prompt's, their `weight` is 0 or their `train` is false.

    Raises ConfigError for invalid messages, BadRowError, at `where`, if a model would learn none of
    them.
    """
    tools = record.get("tools")
    if tools is None and isinstance(functions := record.get("functions"), list):  # the older form
        tools = [{"type": "function", "function": each} for each in functions]
    messages, n_given = messages_of(record, form)
    whole = normalized(messages)
    tools = normalized_tools(tools)
    variables = normalized_variables(record.get("chat_template_kwargs"))
    for number, message in enumerate(whole):
        if message.get("weight", 1) not in (0, 1):
            raise BadRowError(
                f"{where}: message {number} has weight={message['weight']!r:.20}; an answer is "
                "learned (1) or only read (0)"
            )
    # OpenAI's way and axolotl's to say that an answer is only read.
    is_learned = [each.get("weight", 1) and each.get("train", True) for each in whole]
    targets = [
        n for n in range(n_given, len(whole)) if whole[n]["role"] == ASSISTANT and is_learned[n]
    ]
    if not targets:
        raise BadRowError(
            f"{where}: no message of role {ASSISTANT!r}, so there is nothing to learn; leave the "
            "record out"
        )
    return Chat(whole, targets, tools, variables, form.said)
