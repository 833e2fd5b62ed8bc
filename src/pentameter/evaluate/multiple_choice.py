"""Multiple choice: questions from a JSONL file, scores for their choices, and accuracy.

A line is an object in one of two forms:

    {"ctx": "A man is sitting on a roof. he", "endings": ["…", "…", "…", "…"], "label": 3}
    {"context": "A man is sitting on a roof. He", "choices": ["…", "…"], "answer": 1}

The first is HellaSwag's own (Zellers et al., 2019), with `ctx_a` and `ctx_b` as alternatives to
`ctx`. The answer is the index of the right choice, from 0, as a number or as a string of digits.
Other fields are ignored.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.config.messages import shown
from pentameter.data.batches.step import padded_batch
from pentameter.data.tokenizers.base import Ids, Tokenizer
from pentameter.disk.atomic import storage_errors
from pentameter.errors import ConfigError, CorruptError, lone_surrogate
from pentameter.evaluate.split import perplexity
from pentameter.parallel.engine import Engine
from pentameter.record.events import ChoiceMetrics

Floats = npt.NDArray[np.float64]

FORMS = '"ctx", "endings", "label" (HellaSwag), or "context", "choices", "answer"'


def evaluate_multiple_choice(
    engine: Engine,
    questions: EncodedQuestions,
    *,
    name: str,
    step: int,
    batch_size: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> ChoiceMetrics | None:
    """Compute loss and accuracies over `questions`; return None if `should_stop`, which is called
    before each batch, ended it early.

    `name` and `step` label the result. `batch_size` choices run at once, over all ranks; the
    figures do not depend on it. The loss is NaN if any logit is. Collective.
    """
    start = time.perf_counter()
    scores = choice_scores(engine, questions.choices, batch_size=batch_size, stop=should_stop)
    if scores is None:
        return None
    n_tokens = np.array([choice.n_scored for choice in questions.choices])
    n_bytes = np.array([choice.n_bytes for choice in questions.choices])
    right = questions.right
    nats = math.nan if np.isnan(scores).any() else -float(scores[right].sum())
    loss = nats / int(n_tokens[right].sum())
    return ChoiceMetrics(
        step=step,
        split=name,
        loss=loss,
        perplexity=perplexity(loss),
        bits_per_byte=nats / math.log(2) / int(n_bytes[right].sum()),
        tokens=int(n_tokens[right].sum()),
        seconds=time.perf_counter() - start,
        examples=len(questions.answers),
        accuracy=questions.accuracy(scores),
        accuracy_per_token=questions.accuracy(scores / n_tokens),
        accuracy_per_byte=questions.accuracy(scores / n_bytes),
    )


def choice_scores(
    engine: Engine,
    choices: Sequence[ChoiceTokens],
    *,
    batch_size: int,
    stop: Callable[[], bool] = lambda: False,
) -> Floats | None:
    """Return the log-probability, in nats, of each choice given its context: (n_choices,) float64.
    Return None if `stop`, which is called before each batch, ended it early.

    `batch_size` choices of similar lengths run at once, over all ranks. Scores do not depend on it,
    because a causal model cannot see the padding behind a choice. Collective: every rank gets all
    scores.
    """
    scores = np.empty(len(choices))
    # The longest first: if memory is short, that shows at once.
    order = np.argsort([-len(choice.tokens) for choice in choices], kind="stable")
    context_length = engine.plan.config.model.context_length
    for first in range(0, len(order), batch_size):
        if stop():
            return None
        together = order[first : first + batch_size]
        rows = [(choices[index].tokens, choices[index].mask) for index in together]
        batch = padded_batch(rows, np.arange(len(rows), dtype=np.int64), context_length)
        scores[together] = -engine.row_losses(batch)
    return scores


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
    """One choice of a question as token ids: those of the context, and behind them those of the
    choice."""

    tokens: Ids
    """Token ids (n,) of context and choice; at most context_length + 1, for which the context is
    shortened."""
    n_scored: int
    """Number of tokens in the choice, at the end."""
    n_bytes: int
    """UTF-8 bytes in the choice, without the space that joins it to the context."""

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """Boolean mask (n,), True for the choice's tokens."""
        return np.arange(len(self.tokens)) >= len(self.tokens) - self.n_scored


@dataclass(frozen=True)
class EncodedQuestions:
    """Questions as token ids for one model. The choices of all questions are in one list."""

    choices: Sequence[ChoiceTokens]
    """The choices of all questions, in order."""
    first_choices: Ids
    """Index (n_questions,) in `choices` of each question's first choice."""
    answers: Ids
    """Index (n_questions,) of each question's right choice, counted within the question."""

    @property
    def right(self) -> Ids:
        """Index (n_questions,) in `choices` of each question's right choice."""
        return self.first_choices + self.answers

    @property
    def longest(self) -> int:
        """Number of input tokens of the longest choice with its context; the last token is only a
        target."""
        return max(len(choice.tokens) for choice in self.choices) - 1

    def accuracy(self, scores: Floats) -> float:
        """Return the fraction of questions whose right choice scores highest; `scores` (n_choices,)
        are in the order of `choices`."""
        of_questions = np.split(scores, self.first_choices[1:])
        best = np.array([int(np.argmax(each)) for each in of_questions])
        return float(np.mean(best == self.answers))


def read_questions(path: Path) -> list[Question]:
    """Read the questions in a JSONL file, in order; empty lines are skipped.

    Raises ConfigError if there is no such file, StorageError if it cannot be read, CorruptError
    with FILE:LINE for a line that is no question, and for a file without any.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give a JSONL file with one question a line")
    with storage_errors(path, "read"):
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
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
) -> EncodedQuestions:
    """Tokenize every choice of every question, in order.

    Context and choice are joined by one space that belongs to the choice, as in GPT-2's
    evaluations. There is no such space if the context is empty or ends with white space, or the
    choice begins with it. As in lm-eval, white space at the end of the context belongs to the
    choice. Both are encoded as one text; the choice's tokens are those after as many as the context
    has by itself. A context that is too long loses its beginning. One without tokens becomes the
    tokenizer's end_of_text.

    Raises ConfigError, with FILE:LINE, for a choice longer than context_length tokens, one that the
    tokenizer cannot encode or encodes to nothing, and for an empty context if the tokenizer has no
    end_of_text.
    """
    rows = []
    for question in questions:
        context, choices = _encoded(question, tokenizer)
        for index, (choice, ids) in enumerate(zip(question.choices, choices, strict=True)):
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
    sizes = [len(question.choices) for question in questions]
    return EncodedQuestions(
        choices=rows,
        first_choices=np.cumsum([0, *sizes[:-1]]),
        answers=np.array([question.answer for question in questions]),
    )


def _encoded(question: Question, tokenizer: Tokenizer) -> tuple[Ids, list[Ids]]:
    """Return (token ids of a question's context, token ids of each choice). The context begins with
    the tokenizer's prefix and has at least one token."""
    end = tokenizer.end_of_text
    stands = np.array(tokenizer.prefix or ([] if end is None else [end]), dtype=np.int64)
    context = question.context.rstrip()
    ids = _encode(tokenizer, question, "the context", context)
    if not len(ids) and not len(stands):  # nothing but white space can stand for it
        context = question.context
        ids = _encode(tokenizer, question, "the context", context)
        if not len(ids):
            raise ConfigError(
                f"{question.source}: the context {shown(context)} has no token, and the "
                f"{tokenizer.kind} tokenizer has no end-of-text token to stand for it: the first "
                "token of a choice cannot be predicted from nothing"
            )
    space = question.context[len(context) :]
    separator = " " if question.context and not question.context[-1].isspace() else ""
    choices = []
    for index, choice in enumerate(question.choices):
        text = space + (choice if choice[0].isspace() else separator + choice)
        alone = _encode(tokenizer, question, f"choice {index}", text)
        behind = tokenizer.encode(context + text)[len(ids) :]
        choices.append(behind if len(behind) else alone)  # of which lm-eval has no number
    return (np.concatenate([stands, ids]) if tokenizer.prefix or not len(ids) else ids), choices


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
    if (at := lone_surrogate(value)) is not None:
        raise CorruptError(f"{what} holds a lone surrogate at position {at}; it is no valid text")
    return value


def _encode(tokenizer: Tokenizer, question: Question, what: str, text: str) -> Ids:
    try:
        return tokenizer.encode(text)
    except ConfigError as error:
        raise ConfigError(f"{question.source}: {what}, {shown(text)}: {error}") from error
