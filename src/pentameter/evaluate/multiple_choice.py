"""Multiple choice: questions from a JSONL file, scores for their choices, and accuracy.

A line is an object in one of two forms:

    {"ctx": "A man is sitting on a roof. he", "endings": ["…", "…", "…", "…"], "label": 3}
    {"context": "A man is sitting on a roof. He", "choices": ["…", "…"], "answer": 1}

The first is HellaSwag's own (Zellers et al., 2019), with `ctx_a` and `ctx_b` as alternatives to
`ctx`. The answer counts from 0, as a number or as digits. Other fields are ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pentameter.config.messages import shown
from pentameter.data.tokenizers.base import Ids, Tokenizer
from pentameter.errors import ConfigError, CorruptError, StorageError
from pentameter.model.gpt import GPT
from pentameter.model.loss import loss_sum
from pentameter.parallel.engine import Engine

Floats = npt.NDArray[np.float64]

FORMS = '"ctx", "endings", "label" (HellaSwag), or "context", "choices", "answer"'


@dataclass(frozen=True)
class ChoiceMetrics:
    """Accuracies from 0 to 1, with the likeliest choice determined by three measures."""

    examples: int
    """Number of questions."""
    accuracy: float
    """By log-probability, summed over the choice's tokens."""
    accuracy_per_token: float
    """By log-probability per token in the choice."""
    accuracy_per_byte: float
    """By log-probability per UTF-8 byte in the choice."""
    seconds: float


def evaluate_multiple_choice(
    engine: Engine, tokenizer: Tokenizer, questions: Sequence[Question], *, batch_size: int
) -> ChoiceMetrics:
    """Compute accuracies over `questions`; among equally likely choices the first counts.

    Raises ConfigError, with FILE:LINE, for questions that the model or the tokenizer cannot take
    (see `encode_questions`).
    """
    start = time.perf_counter()
    choices = encode_questions(questions, tokenizer, engine.plan.config.model.context_length)
    scores = choice_scores(engine, choices, batch_size=batch_size)
    per_token = scores / np.array([choice.n_scored for choice in choices])
    per_byte = scores / np.array([choice.n_bytes for choice in choices])
    return ChoiceMetrics(
        examples=len(questions),
        accuracy=_accuracy(questions, scores),
        accuracy_per_token=_accuracy(questions, per_token),
        accuracy_per_byte=_accuracy(questions, per_byte),
        seconds=time.perf_counter() - start,
    )


def choice_scores(engine: Engine, choices: Sequence[ChoiceTokens], *, batch_size: int) -> Floats:
    """Return each choice's log-probability, in nats, given its context: (n_choices,) float64.

    `batch_size` choices with similar lengths run at once; scores do not depend on it. Raises
    CorruptError if the model's logits are NaN.
    """
    scores = np.empty(len(choices))
    # The longest first: if memory is short, that shows at once.
    order = sorted(range(len(choices)), key=lambda index: -len(choices[index].tokens))
    for first in range(0, len(order), batch_size):
        together = order[first : first + batch_size]
        scores[together] = _scores(engine, [choices[index] for index in together])
    if np.isnan(scores).any():
        raise CorruptError("the model's logits are NaN: its weights are damaged; take another")
    return scores


@torch.inference_mode()
def _scores(engine: Engine, choices: Sequence[ChoiceTokens]) -> list[float]:
    """Return log-probabilities for choices that run together, the shorter ones padded at their end.

    Padding comes after everything that counts, so a causal model cannot see it. Logits are computed
    one choice at a time and only for its tokens: for a large vocabulary they take most memory.
    """
    model = engine.model.eval()
    assert isinstance(model, GPT)  # as `eval` loads it
    vocab_size = model.config.vocab_size
    assert vocab_size is not None  # of a model that exists
    inputs = np.zeros((len(choices), max(len(choice.tokens) for choice in choices) - 1), np.int64)
    for row, choice in enumerate(choices):
        inputs[row, : len(choice.tokens) - 1] = choice.tokens[:-1]
    losses = []
    with engine.arithmetic.autocast(engine.device):
        hidden = model.hidden_states(torch.from_numpy(inputs).to(engine.device))  # (B, T, D)
        for row, choice in enumerate(choices):
            end = len(choice.tokens) - 1
            logits = model.logits(hidden[row : row + 1, end - choice.n_scored : end])
            targets = torch.from_numpy(choice.tokens[None, -choice.n_scored :]).to(engine.device)
            losses.append(loss_sum(logits, targets, vocab_size))
    return [-loss for loss in torch.stack(losses).tolist()]


def _accuracy(questions: Sequence[Question], scores: Floats) -> float:
    """Return the fraction of questions whose right choice scores highest; `scores` (n_choices,)
    follow the questions' order."""
    n_right = first = 0
    for question in questions:
        n_choices = len(question.choices)
        n_right += int(np.argmax(scores[first : first + n_choices])) == question.answer
        first += n_choices
    return n_right / len(questions)


@dataclass(frozen=True)
class Question:
    """A context, its possible choices, and the right one."""

    source: str
    """FILE:LINE, for messages."""
    context: str
    choices: tuple[str, ...]
    answer: int
    """Right choice's index."""


@dataclass(frozen=True)
class ChoiceTokens:
    """One question's choice, behind its context."""

    tokens: Ids
    """(n,) token ids for context and choice; at most context_length + 1, the context shortened to
    fit."""
    n_scored: int
    """Number of tokens in the choice, at the end."""
    n_bytes: int
    """UTF-8 bytes in the choice, without the space that joins it to the context."""


def read_questions(path: Path) -> list[Question]:
    """Read the questions in a JSONL file, in order; empty lines are skipped.

    Raises ConfigError if there is no such file, StorageError if it cannot be read, CorruptError
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
    """Tokenize every choice in every question, in order.

    Context and choice are encoded separately, joined by one space that belongs to the choice, like
    in GPT-2's evaluations; no such space if the context is empty or ends with white space, or the
    choice begins with it. A context that is too long loses its beginning. One without tokens
    becomes the tokenizer's end_of_text.

    Raises ConfigError, with FILE:LINE, for a choice longer than context_length tokens, one that the
    tokenizer cannot encode or encodes to nothing, and for an empty context if the tokenizer has no
    end_of_text.
    """
    rows = []
    for question in questions:
        context = _encode(tokenizer, question, "the context", question.context)
        if not len(context):
            if tokenizer.end_of_text is None:
                raise ConfigError(
                    f"{question.source}: the context {shown(question.context)} has no token, and "
                    f"the {tokenizer.kind} tokenizer has no end-of-text token to stand for it: the "
                    "first token of a choice cannot be predicted from nothing"
                )
            context = np.array([tokenizer.end_of_text], dtype=np.int64)
        for index, choice in enumerate(question.choices):
            separator = " " if question.context and not question.context[-1].isspace() else ""
            text = choice if choice[0].isspace() else separator + choice
            ids = _encode(tokenizer, question, f"choice {index}", text)
            if not 1 <= len(ids) <= context_length:
                raise ConfigError(
                    f"{question.source}: choice {index} has {len(ids)} tokens; the model can score "
                    f"1 … {context_length} (its context_length): {shown(choice)}"
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


def _question(line: bytes, source: str) -> Question:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise CorruptError(f"{source}: not UTF-8 text (byte {error.start + 1})") from None
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{source}: not JSON: {error}; one object a line is expected") from None
    if not isinstance(record, dict):
        raise CorruptError(f"{source}: {shown(record)} is no object with {FORMS}")
    names = ("endings", "label") if "endings" in record else ("choices", "answer")
    choices = record.get(names[0])
    if not isinstance(choices, list) or len(choices) < 2:
        given = "is missing" if choices is None else f"is {shown(choices)}"
        raise CorruptError(
            f'{source}: "{names[0]}" {given}; a list of at least two texts is expected, in an '
            f"object with {FORMS}"
        )
    texts = tuple(
        _text(choice, f"{source}: {names[0]}[{index}]") for index, choice in enumerate(choices)
    )
    if "" in texts:
        raise CorruptError(f"{source}: {names[0]}[{texts.index('')}] is empty: nothing to score")
    if names[0] == "choices":
        context = _text(record.get("context"), f'{source}: "context"')
    elif "ctx" in record or "ctx_a" not in record:
        context = _text(record.get("ctx"), f'{source}: "ctx"')
    else:
        parts = [_text(record.get(name, ""), f'{source}: "{name}"') for name in ("ctx_a", "ctx_b")]
        context = " ".join(part for part in parts if part)
    return Question(source, context, texts, _answer(record, names[1], len(texts), source))


def _answer(record: Mapping[str, Any], name: str, n_choices: int, source: str) -> int:
    value = record.get(name)
    if value is None or value == "":
        raise CorruptError(
            f'{source}: "{name}" is missing: the right choice is not known. The test files of '
            "benchmarks lack it; take the validation file"
        )
    digits = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10
    number = int(value) if digits else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < n_choices:
        raise CorruptError(
            f'{source}: "{name}" is {shown(value)}; one of 0 … {n_choices - 1} is expected'
        )
    return number


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        given = "is missing" if value is None else f"is {shown(value)}"
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
        raise ConfigError(f"{question.source}: {what}, {shown(text)}: {error}") from error
