"""The loss of a split: the same number at any batch size, and token by token what it says it is."""

import math

import numpy as np
import pytest
import torch

from pentameter.config.schema import Config
from pentameter.data.shards.dataset import TokenSequence, TokenSplit
from pentameter.evaluate.split import evaluate, rows_at_once
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan

CPU = torch.device("cpu")
CONTEXT = 8
VOCABULARY = 11
N_TOKENS = 8 * 70 + 4  # 71 rows: an uneven batch at the end for 3, 7 and 64, and an uneven last row


def stage(precision="fp64", **data):
    config = Config.model_validate(
        {
            "model": {
                "vocab_size": VOCABULARY,
                "vocab_multiple": 8,
                "context_length": CONTEXT,
                "n_layers": 2,
                "n_heads": 2,
                "d_model": 16,
                "dropout": 0.3,
                "init_std": 0.5,  # logits that differ
            },
            "data": {"corpus": "grammar", **data},
            "train": {"steps": 1, "batch_size": 1},
        }
    )
    return assemble(make_plan(config), CPU, precision, compiled=False)


def split(n_tokens=N_TOKENS, starts=(0,)):
    ids = np.random.default_rng(5).integers(0, VOCABULARY, n_tokens).astype(np.uint16)
    tokens = TokenSequence([ids], 0, n_tokens)
    return TokenSplit("val", tokens, 3 * n_tokens, np.array(starts, dtype=np.int64))


def measure(stage, split, batch_size=4, stride=None):
    return evaluate(stage, split, name="val", step=0, batch_size=batch_size, stride=stride)


def test_a_gpu_takes_more_short_rows_at_once():
    assert [rows_at_once("cpu", length) for length in (1, 100, 4096)] == [32, 32, 32]
    assert [rows_at_once("cuda", length) for length in (100, 1024, 4096)] == [327, 32, 32]


def loss_of_each(stage, split, contexts):
    """The mean of -log p of each token, given (token, first token of its context)."""
    ids = torch.from_numpy(split.tokens[:].astype(np.int64))
    stage.model.eval()
    total = 0.0
    with torch.inference_mode():
        for token, first in contexts:
            logits = stage.model(ids[None, first:token])[0, -1, :VOCABULARY]
            total -= torch.log_softmax(logits, dim=0)[ids[token]].item()
    return total / len(contexts)


@pytest.mark.parametrize(("precision", "rel"), [("fp64", 1e-12), ("fp32", 1e-6)])
@pytest.mark.parametrize("stride", [None, 3])
def test_the_loss_is_the_same_number_at_any_batch_size(precision, rel, stride):
    model, text = stage(precision), split()
    whole = measure(model, text, 1, stride)
    assert whole.tokens == N_TOKENS - 1
    for batch_size in (3, 7, 64):
        metrics = measure(model, text, batch_size, stride)
        assert metrics.tokens == whole.tokens
        assert metrics.loss == pytest.approx(whole.loss, rel=rel)  # fp32: sums in another order


def test_the_loss_is_the_mean_over_every_token():
    model, text = stage(), split(45)
    contexts = [(token, (token - 1) // CONTEXT * CONTEXT) for token in range(1, 45)]
    metrics = measure(model, text)
    assert metrics.loss == pytest.approx(loss_of_each(model, text, contexts), rel=1e-12)
    assert metrics.perplexity == pytest.approx(math.exp(metrics.loss))
    assert metrics.bits_per_byte == pytest.approx(metrics.loss / math.log(2) / 3)


@pytest.mark.parametrize("stride", [1, 3, 5, CONTEXT])
def test_a_stride_gives_each_token_the_context_of_its_window(stride):
    model, text = stage(), split(45)
    contexts = []
    for token in range(1, 45):
        window = max(0, math.ceil((token - CONTEXT) / stride))  # the first that reaches the token
        contexts.append((token, window * stride))
    assert min(token - first for token, first in contexts[CONTEXT:]) > CONTEXT - stride
    metrics = measure(model, text, stride=stride)
    assert metrics.tokens == 44
    assert metrics.loss == pytest.approx(loss_of_each(model, text, contexts), rel=1e-12)


def test_the_whole_context_as_stride_is_the_plain_loss():
    model, text = stage(), split()
    assert measure(model, text, stride=CONTEXT).loss == measure(model, text).loss


@pytest.mark.parametrize("stride", [None, 2])
def test_documents_are_evaluated_one_by_one(stride):
    text = split(45, starts=(0, 20, 21, 33))
    model = stage(order="documents")
    parts = []
    for start, stop in ((0, 20), (20, 21), (21, 33), (33, 45)):
        if stop - start > 1:
            part = TokenSplit("val", TokenSequence([text.tokens[start:stop]], 0, stop - start), 1)
            parts.append(measure(model, part, stride=stride))
    metrics = measure(model, text, stride=stride)
    assert metrics.tokens == sum(part.tokens for part in parts) == 45 - 4
    expected = sum(part.loss * part.tokens for part in parts) / metrics.tokens
    assert metrics.loss == pytest.approx(expected, rel=1e-12)
    packed = stage(order="documents", packing=True)
    assert measure(packed, text, stride=stride).tokens == 44
