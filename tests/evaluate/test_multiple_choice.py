"""Scores of choices: those of one pass each, whatever runs together, and the right ones win."""

import math

import numpy as np
import pytest
import torch

from pentameter.config.schema import Config
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.evaluate.multiple_choice import (
    Question,
    choice_scores,
    encode_questions,
    evaluate_multiple_choice,
)
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan

CPU = torch.device("cpu")
TOKENIZER = CharTokenizer("abcdefgh ")
CONTEXT = 12


def plan(vocab_size=TOKENIZER.vocab_size, **model):
    return make_plan(
        Config.model_validate(
            {
                "model": {
                    "vocab_size": vocab_size,
                    "vocab_multiple": 4,
                    "context_length": CONTEXT,
                    "n_layers": 2,
                    "n_heads": 2,
                    "d_model": 16,
                    "dropout": 0.3,
                    "init_std": 0.5,  # logits that differ
                    **model,
                },
                "data": {"corpus": "grammar"},
                "train": {"steps": 1, "batch_size": 1},
            }
        )
    )


def random_questions(n_questions=12):
    draw = np.random.default_rng(7)

    def text(most):
        return "".join(draw.choice(list("abcdefgh"), draw.integers(1, most)))

    return [
        Question(
            f"q:{number}",
            text(30),
            tuple(text(CONTEXT - 1) for _ in range(draw.integers(2, 5))),
            int(draw.integers(2)),
        )
        for number in range(n_questions)
    ]


def brute_force(engine, question):
    """Each choice's log-probability: one forward pass for each of its characters."""
    engine.model.eval()
    scores = []
    for choice in question.choices:
        ids = TOKENIZER.encode(f"{question.context} {choice}")[-(CONTEXT + 1) :]
        score = 0.0
        for place in range(len(ids) - len(choice) - 1, len(ids)):
            with torch.inference_mode():
                logits = engine.model(torch.from_numpy(ids[None, :place]))[0, -1]
            allowed = logits[: TOKENIZER.vocab_size].log_softmax(0)
            score += allowed[ids[place]].item()
        scores.append(score)
    return scores


@pytest.mark.parametrize("model", [{}, {"n_experts": 4, "expert_capacity": 0.5}])
@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_scores_are_those_of_one_pass_for_each_token(batch_size, model):
    engine = assemble(plan(**model), CPU, "fp64", compiled=False)
    questions = random_questions()
    expected = [score for question in questions for score in brute_force(engine, question)]
    choices = encode_questions(questions, TOKENIZER, CONTEXT)
    scores = choice_scores(engine, choices.choices, batch_size=batch_size)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-10)


def evaluated(engine, tokenizer, questions):
    encoded = encode_questions(questions, tokenizer, CONTEXT)
    metrics = evaluate_multiple_choice(engine, encoded, name="q", step=0, batch_size=7)
    assert metrics is not None
    return metrics


def test_accuracies_count_the_right_choices():
    engine = assemble(plan(), CPU, "fp64", compiled=False)
    questions = random_questions()
    right = [0, 0, 0]
    for question in questions:
        scores = np.array(brute_force(engine, question))
        n_tokens = np.array([len(choice) + 1 for choice in question.choices])
        for measure, by in enumerate((scores, scores / n_tokens, scores / (n_tokens - 1))):
            right[measure] += int(by.argmax()) == question.answer
    metrics = evaluated(engine, TOKENIZER, questions)
    found = (metrics.accuracy, metrics.accuracy_per_token, metrics.accuracy_per_byte)
    assert metrics.examples == 12
    assert found == tuple(n / 12 for n in right)


def fixed(probabilities):
    """An engine that predicts each character with a fixed probability; its tokenizer."""
    tokenizer = CharTokenizer("".join(probabilities))
    head = {"tied_head": False, "head_bias": True}
    engine = assemble(plan(tokenizer.vocab_size, **head), CPU, "fp64", compiled=False)
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.zero_()
        for index, character in enumerate(tokenizer.characters):
            engine.model.head.bias[index] = math.log(probabilities[character])
    return engine, tokenizer


def test_three_measures_and_what_each_prefers():
    engine, tokenizer = fixed({"a": 1 / 2, "b": 1 / 4, " ": 1 / 8, "é": 1 / 8})
    choices = ("a", "aaaa", "b", "é")
    rows = encode_questions([Question("q:1", "ab", choices, 0)], tokenizer, CONTEXT)
    scores = choice_scores(engine, rows.choices, batch_size=3)
    expected = [math.log(1 / 8) + n * math.log(p) for n, p in ((1, 1 / 2), (4, 1 / 2), (1, 1 / 4))]
    expected.append(2 * math.log(1 / 8))
    np.testing.assert_allclose(scores, expected, rtol=1e-14)

    def right(a, b, answer):
        questions = [Question("q:1", "ab", (a, b), answer)]
        metrics = evaluated(engine, tokenizer, questions)
        return metrics.accuracy, metrics.accuracy_per_token, metrics.accuracy_per_byte

    # " a" is likelier than " aaaa", but not per token (-1.39 against -0.97) or byte (-2.77, -1.21).
    assert right("a", "aaaa", 0) == (1, 0, 0)
    # " b" is likelier than " é" and has as many tokens, but half the bytes.
    assert right("b", "é", 0) == (1, 1, 0)
    assert right("b", "é", 1) == (0, 0, 1)
    assert right("ab", "ba", 0) == (1, 1, 1)  # equally likely: the first


def test_the_loss_is_that_of_the_right_choices():
    engine, tokenizer = fixed({"a": 1 / 2, "b": 1 / 4, " ": 1 / 8, "é": 1 / 8})
    questions = [
        Question("q:1", "ab", ("a", "b"), 1),  # " b": ln 8 + ln 4
        Question("q:2", "ab", ("a", "b", "aé"), 2),  # " aé": ln 8 + ln 2 + ln 8
    ]
    metrics = evaluated(engine, tokenizer, questions)
    assert (metrics.examples, metrics.tokens) == (2, 5)
    assert metrics.loss == pytest.approx(12 * math.log(2) / 5, rel=1e-14)
    assert metrics.perplexity == pytest.approx(2 ** (12 / 5), rel=1e-14)
    assert metrics.bits_per_byte == pytest.approx(12 / 4, rel=1e-14)  # "b", and "aé" of 3 bytes


def test_the_loss_of_weights_that_are_no_numbers_is_none():
    engine = assemble(plan(), CPU, "fp64", compiled=False)
    with torch.no_grad():
        next(engine.model.parameters()).fill_(math.nan)
    assert math.isnan(evaluated(engine, TOKENIZER, random_questions(1)).loss)


def test_a_stop_ends_it_between_two_batches():
    engine = assemble(plan(), CPU, "fp64", compiled=False)
    answers = iter([False, False, True])
    encoded = encode_questions(random_questions(), TOKENIZER, CONTEXT)
    assert choice_scores(engine, encoded.choices, batch_size=2, stop=lambda: next(answers)) is None
