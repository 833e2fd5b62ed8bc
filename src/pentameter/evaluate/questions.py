"""Multiple-choice questions from a JSONL file, as tokens.

A line is an object in one of two forms:

    {"ctx": "A man is sitting on a roof. he", "endings": ["…", "…", "…", "…"], "label": 3}
    {"context": "A man is sitting on a roof. He", "choices": ["…", "…"], "answer": 1}

The first is HellaSwag's own (Zellers et al., 2019), where `ctx_a` and `ctx_b` may stand in place of
`ctx`. The answer counts from 0, as a number or as digits. Other fields are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.data.tokenizers.base import Ids, Tokenizer
from pentameter.errors import ConfigError, CorruptError, StorageError

FORMS = '"ctx", "endings", "label" (HellaSwag), or "context", "choices", "answer"'
SHOWN_CHARACTERS = 60  # of a text, in a message


@dataclass(frozen=True)
class Question:
    """A context, the choices that may follow it, and the right one of them."""

    place: str
    """FILE:LINE, for messages."""
    context: str
    choices: tuple[str, ...]
    answer: int
    """Index of the right choice."""


@dataclass(frozen=True)
class ChoiceTokens:
    """One choice of one question, behind its context."""

    tokens: Ids
    """(n,) token ids of context and choice; at most context_length + 1, the context cut for it."""
    n_scored: int
    """How many of them, at the end, are the choice."""
    n_bytes: int
    """UTF-8 bytes of the choice, without the space that joins it to the context."""


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSONL file, in order; empty lines are passed over.

    Raises ConfigError when there is no such file, StorageError when it cannot be read, CorruptError
    with FILE:LINE for a line that is no question, and for a file without any.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give a JSONL file with one question a line")
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    questions = [
        _question(line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not questions:
        raise CorruptError(f"{path} is empty; a line is an object with {FORMS}")
    return questions


def encode_questions(
    questions: Sequence[Question], tokenizer: Tokenizer, context_length: int
) -> list[ChoiceTokens]:
    """Every choice of every question as tokens, in order.

    Context and choice are encoded by themselves, joined by one space that belongs to the choice, as
    GPT-2's evaluations do; there is no such space where the context is empty or ends with white
    space, or the choice begins with it. A context that is too long loses its beginning. One without
    tokens becomes the tokenizer's end_of_text.

    Raises ConfigError, with FILE:LINE, for a choice longer than context_length tokens, one that
    the tokenizer cannot encode or makes nothing of, and for an empty context where the tokenizer
    has no end_of_text.
    """
    rows = []
    for question in questions:
        context = _encode(tokenizer, question, "the context", question.context)
        if not len(context):
            context = _empty_context(tokenizer, question)
        for index, choice in enumerate(question.choices):
            joint = " " if question.context and not question.context[-1].isspace() else ""
            text = choice if choice[0].isspace() else joint + choice
            ids = _encode(tokenizer, question, f"choice {index}", text)
            if not 1 <= len(ids) <= context_length:
                raise ConfigError(
                    f"{question.place}: choice {index} has {len(ids)} tokens; the model can score "
                    f"1 … {context_length} (its context_length): {_shown(choice)}"
                )
            kept = context[-(context_length + 1 - len(ids)) :]
            rows.append(
                ChoiceTokens(
                    tokens=np.concatenate([kept, ids]),
                    n_scored=len(ids),
                    n_bytes=len(choice.encode()),
                )
            )
    return rows


def _question(line: bytes, place: str) -> Question:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise CorruptError(f"{place}: not UTF-8 text (byte {error.start + 1})") from None
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{place}: not JSON: {error}; one object a line is expected") from None
    if not isinstance(record, dict):
        raise CorruptError(f"{place}: {_shown(record)} is no object with {FORMS}")
    names = ("endings", "label") if "endings" in record else ("choices", "answer")
    choices = record.get(names[0])
    if not isinstance(choices, list) or len(choices) < 2:
        given = "is missing" if choices is None else f"is {_shown(choices)}"
        raise CorruptError(
            f'{place}: "{names[0]}" {given}; a list of at least two texts is expected, in an '
            f"object with {FORMS}"
        )
    texts = tuple(
        _text(choice, f"{place}: {names[0]}[{index}]") for index, choice in enumerate(choices)
    )
    if "" in texts:
        raise CorruptError(f"{place}: {names[0]}[{texts.index('')}] is empty: nothing to score")
    context = _context(record, place, is_hellaswag=names[0] == "endings")
    return Question(place, context, texts, _answer(record, names[1], len(texts), place))


def _context(record: Mapping[str, Any], place: str, *, is_hellaswag: bool) -> str:
    if not is_hellaswag:
        return _text(record.get("context"), f'{place}: "context"')
    if "ctx" in record or "ctx_a" not in record:
        return _text(record.get("ctx"), f'{place}: "ctx"')
    parts = [_text(record.get(name, ""), f'{place}: "{name}"') for name in ("ctx_a", "ctx_b")]
    return " ".join(part for part in parts if part)


def _answer(record: Mapping[str, Any], name: str, n_choices: int, place: str) -> int:
    value = record.get(name)
    if value is None or value == "":
        raise CorruptError(
            f'{place}: "{name}" is missing: the right choice is not known. The test files of '
            "benchmarks lack it; take the validation file"
        )
    digits = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10
    number = int(value) if digits else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < n_choices:
        raise CorruptError(
            f'{place}: "{name}" is {_shown(value)}; one of 0 … {n_choices - 1} is expected'
        )
    return number


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        given = "is missing" if value is None else f"is {_shown(value)}"
        raise CorruptError(f"{what} {given}; a text is expected")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CorruptError(
            f"{what} holds a lone surrogate at position {error.start}; it is no valid text"
        ) from None
    return value


def _encode(tokenizer: Tokenizer, question: Question, what: str, text: str) -> Ids:
    try:
        return tokenizer.encode(text)
    except ConfigError as error:
        raise ConfigError(f"{question.place}: {what}, {_shown(text)}: {error}") from error


def _empty_context(tokenizer: Tokenizer, question: Question) -> npt.NDArray[np.int64]:
    if tokenizer.end_of_text is None:
        raise ConfigError(
            f"{question.place}: the context {_shown(question.context)} has no token, and the "
            f"{tokenizer.kind} tokenizer has no end-of-text token to stand for it: the first token "
            "of a choice cannot be predicted from nothing"
        )
    return np.array([tokenizer.end_of_text], dtype=np.int64)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
