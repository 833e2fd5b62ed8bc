"""Multiple choice: scores the continuations of each question, and the share answered right."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pentameter.data.tokenizers.base import Tokenizer
from pentameter.errors import CorruptError
from pentameter.evaluate.questions import ChoiceTokens, Question, encode_questions
from pentameter.model.loss import loss_sum
from pentameter.parallel.engine import Engine

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ChoiceMetrics:
    """Shares of questions whose likeliest choice is right, by three measures of likeliest."""

    examples: int
    """Questions."""
    accuracy: float
    """By log-probability, summed over the choice's tokens."""
    accuracy_per_token: float
    """By that divided by the choice's tokens."""
    accuracy_per_byte: float
    """By that divided by the choice's UTF-8 bytes."""
    seconds: float


def evaluate_multiple_choice(
    engine: Engine, tokenizer: Tokenizer, questions: Sequence[Question], *, batch_size: int
) -> ChoiceMetrics:
    """The accuracies over `questions`, of choices equally likely the first.

    Raises ConfigError, with FILE:LINE, for what the model or the tokenizer cannot take (see
    `encode_questions`).
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
    """The log-probability, in nats, of each choice given its context: (n_choices,).

    `batch_size` choices of similar length run at once; the scores do not depend on it. Raises
    CorruptError when the model's logits are not numbers.
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
    """The log-probabilities of choices that run together, the shorter ones padded at their end.

    Padding comes after all that counts, where a causal model cannot look. Logits are computed row
    by row and for the choice alone: of a large vocabulary they are most of the memory.
    """
    model = engine.model.eval()
    vocab_size = model.config.vocab_size
    assert vocab_size is not None  # of a model that exists
    inputs = np.zeros((len(choices), max(len(choice.tokens) for choice in choices) - 1), np.int64)
    for row, choice in enumerate(choices):
        inputs[row, : len(choice.tokens) - 1] = choice.tokens[:-1]
    losses = []
    with engine.autocast():
        hidden = model.hidden_states(torch.from_numpy(inputs).to(engine.device))  # (B, T, D)
        for row, choice in enumerate(choices):
            end = len(choice.tokens) - 1
            logits = model.logits(hidden[row : row + 1, end - choice.n_scored : end])
            targets = torch.from_numpy(choice.tokens[None, -choice.n_scored :]).to(engine.device)
            losses.append(loss_sum(logits, targets, vocab_size))
    return [-loss for loss in torch.stack(losses).tolist()]


def _accuracy(questions: Sequence[Question], scores: Floats) -> float:
    """The share of questions whose right choice has the highest score."""
    n_right = place = 0
    for question in questions:
        n_choices = len(question.choices)
        n_right += int(np.argmax(scores[place : place + n_choices])) == question.answer
        place += n_choices
    return n_right / len(questions)
