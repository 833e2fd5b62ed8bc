"""The source's WikiText-2 figures (docs/wikitext-artefact.md): each of its mistakes, planted alone.

A tiny model of the same family learns a text whose entropy rate is known exactly: 24 words, each
followed by one of two, so no honest evaluation can stay below ln 2 nats per word. Beside our
evaluation stand the source's ways of measuring, each with one thing wrong.

Shapes as in the source: a text is (rows, columns), read downwards; a window is `CONTEXT` rows.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pentameter.config.schema import Config
from pentameter.data.batches.step import Batch, TrainingBatches
from pentameter.data.shards.dataset import TokenSequence, TokenSplit
from pentameter.evaluate.split import evaluate
from pentameter.model.attention.attention import attend_by
from pentameter.model.attention.dot_product import PLAIN_ATTENTION
from pentameter.optim.build import build_optimizer
from pentameter.parallel.assemble import assemble
from pentameter.parallel.engine import Engine
from pentameter.planning.plan import make_plan

VOCAB_SIZE = 24
FLOOR = math.log(2)  # nats per word: two successors, equally likely
CONTEXT = 35  # "bptt"
TRAIN_COLUMNS, EVAL_COLUMNS = 20, 10
N_TEST_WINDOWS = 12
N_STEPS = 100


def two_successors(n_tokens: int, seed: int) -> np.ndarray:
    """A text (n_tokens,): word w is followed by 2w or 2w + 1, so that all words are as frequent."""
    choices = np.random.default_rng(seed).integers(0, 2, n_tokens)
    tokens = np.zeros(n_tokens, dtype="<u4")
    for place in range(1, n_tokens):
        tokens[place] = (2 * tokens[place - 1] + choices[place]) % VOCAB_SIZE
    return tokens


TRAIN = two_successors(20_000, seed=1)
TEST = two_successors(EVAL_COLUMNS * (N_TEST_WINDOWS * CONTEXT + 1), seed=2)
TEST_COLUMNS = torch.from_numpy(TEST.astype(np.int64)).view(EVAL_COLUMNS, -1).t()  # (rows, columns)


def split_of(tokens: np.ndarray, name: str) -> TokenSplit:
    return TokenSplit(name, TokenSequence([tokens], 0, len(tokens)), n_bytes=len(tokens))


def untrained() -> Engine:
    config = Config.model_validate(
        {
            "model": {
                "context_length": CONTEXT,
                "n_layers": 1,
                "n_heads": 2,
                "d_model": 32,
                "d_ff": 32,
                "activation": "relu",
                "norm_position": "post",
                "positions": "sinusoidal",
                "tied_head": False,
                "head_bias": True,
                "qkv_bias": True,
                "bias": True,
                "init": "uniform",
                "embedding_scale": True,
            },
            "data": {"corpus": "grammar", "order": "columns"},
            "optimizer": {"learning_rate": 2e-2},
            "train": {"steps": N_STEPS, "batch_size": TRAIN_COLUMNS},
        }
    )
    return assemble(make_plan(config, VOCAB_SIZE), torch.device("cpu"), "fp64", compiled=False)


def trained(*, transposed: bool = False) -> Engine:
    """A model after `N_STEPS` steps of the package's own training, on targets as asked."""
    stage = untrained()
    config = stage.plan.config
    batches = TrainingBatches(
        split_of(TRAIN, "train"),
        config.data.order,
        seed=config.seed,
        batch_size=TRAIN_COLUMNS,
        context_length=CONTEXT,
    )
    optimizer = build_optimizer(stage.named_parameters(), stage.plan.table, config.optimizer)
    for step in range(N_STEPS):
        batch = batches.batch(step)
        if transposed:
            targets = batch.targets.T.reshape(batch.targets.shape)
            batch = Batch(batch.inputs, targets, batch.rows)
        stage.forward_backward(batch, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return stage


def sees_everything(q, k, v, how):
    """Attention as in the source: no mask."""
    return F.scaled_dot_product_attention(q, k, v)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads only wait for one another over matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def honest() -> Engine:
    return trained()


@pytest.fixture(scope="module")
def trained_without_mask() -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pentameter.parallel.context.run_attention.PLAIN_ATTENTION", sees_everything)
        return trained()


def true_loss(stage: Engine) -> float:
    """What pentameter reports for the test text."""
    metrics = evaluate(stage, split_of(TEST, "test"), name="test", step=0, batch_size=7)
    assert metrics is not None
    return metrics.loss


def window_losses(stage: Engine, *, transposed: bool = False) -> np.ndarray:
    """The mean loss of each window of the columns, the source's `criterion(output, targets)`.

    With `transposed` targets are flattened row by row, while outputs are column by column.
    """
    stage.model.eval()
    losses = []
    for top in range(0, len(TEST_COLUMNS) - 1, CONTEXT):
        inputs = TEST_COLUMNS[top : top + CONTEXT].t()  # (columns, rows): B first, as the outputs
        targets = TEST_COLUMNS[top + 1 : top + 1 + CONTEXT]  # (rows, columns)
        with torch.inference_mode():
            logits = stage.model(inputs).reshape(-1, VOCAB_SIZE)
        targets = targets.flatten() if transposed else targets.t().flatten()
        losses.append(F.cross_entropy(logits, targets).item())
    return np.array(losses)


def source_average(
    losses: np.ndarray, *, n_windows: int, window_size: int, n_rows: int = len(TEST_COLUMNS)
) -> float:
    """How the source sums up: every window's mean × its size, over the rows to be predicted."""
    return float(window_size * losses[:n_windows].sum() / (n_rows - 1))


# Ours is the true loss


def test_ours_is_the_sum_over_every_word_divided_by_their_number(honest):
    """Brute force: each word from nothing but the words before it in its window."""
    total, n_words = 0.0, 0
    n_windows = -(-(len(TEST) - 1) // CONTEXT)
    tokens = torch.from_numpy(TEST.astype(np.int64))
    honest.model.eval()
    for length in range(1, CONTEXT + 1):
        starts = [start * CONTEXT for start in range(n_windows)]
        starts = [start for start in starts if start + length < len(tokens)]
        prefixes = torch.stack([tokens[start : start + length] for start in starts])
        following = tokens[[start + length for start in starts]]
        with torch.inference_mode():
            log_p = torch.log_softmax(honest.model(prefixes)[:, -1], dim=-1)
        total -= log_p[torch.arange(len(starts)), following].sum().item()
        n_words += len(starts)
    assert n_words == len(TEST) - 1
    assert true_loss(honest) == pytest.approx(total / n_words, rel=1e-12)


def test_columns_done_right_agree_with_one_pass_over_the_text(honest):
    """Other windows over the same words: the two differ by where contexts begin, no more."""
    right = source_average(window_losses(honest), n_windows=N_TEST_WINDOWS, window_size=CONTEXT)
    assert right == pytest.approx(true_loss(honest), abs=0.01)
    assert FLOOR < right < FLOOR + 0.05


# Each mistake alone


def test_transposed_targets_hide_what_was_learned(honest):
    wrong = window_losses(honest, transposed=True).mean()
    assert wrong > math.log(VOCAB_SIZE) > true_loss(honest) + 2  # worse than guessing


def test_training_on_transposed_targets_learns_nothing_of_the_text():
    model = trained(transposed=True)
    guessing = math.log(VOCAB_SIZE)  # all words are equally frequent
    assert window_losses(model, transposed=True).mean() > 0.98 * guessing
    assert true_loss(model) > 0.98 * guessing


def test_without_a_mask_the_loss_falls_below_what_is_possible(trained_without_mask):
    wrong = window_losses(trained_without_mask).mean()
    attend_by(trained_without_mask.model, PLAIN_ATTENTION)
    honestly = true_loss(trained_without_mask)
    assert wrong < FLOOR / 4  # the text itself cannot be predicted better than FLOOR
    assert honestly > FLOOR + 0.5  # nothing of it is left when the future is hidden


def test_few_windows_over_all_rows_shrink_the_loss(honest):
    losses, n_windows = window_losses(honest), 3
    wrong = source_average(losses, n_windows=n_windows, window_size=CONTEXT)
    assert wrong == pytest.approx(losses[:n_windows].mean() * n_windows / N_TEST_WINDOWS, rel=1e-12)
    assert wrong < FLOOR / 2 < true_loss(honest) / 2


def test_the_wrong_dimension_scales_the_loss_by_columns_over_rows(honest):
    """`len(data)` counts rows until `data` is transposed for the pipeline; then, columns."""
    losses = window_losses(honest)
    wrong = source_average(losses, n_windows=N_TEST_WINDOWS, window_size=EVAL_COLUMNS)
    assert wrong == pytest.approx(losses.mean() * EVAL_COLUMNS / CONTEXT, rel=1e-12)
    assert wrong < FLOOR / 2 < true_loss(honest) / 2


# The published figures


@pytest.mark.parametrize(
    ("published", "n_words", "lowest", "highest"),
    [
        (0.33, 241_859, 15.7, 16.3),  # test
        (0.38, 214_417, 16.0, 16.6),  # validation, the same model
        (0.24, 214_417, 10.0, 10.6),  # validation an epoch earlier, the headline
    ],
)
def test_the_published_losses_recomputed(published, n_words, lowest, highest):
    """50 windows × 10 columns of loss were divided by the rows to be predicted, less one."""
    n_rows = n_words // EVAL_COLUMNS
    recomputed = published * (n_rows - 1) / (50 * EVAL_COLUMNS)
    assert lowest < recomputed < highest
    for rounded_from in (published - 0.005, published + 0.005):
        # The formula is `source_average`'s, solved for the mean of the windows.
        mean = rounded_from * (n_rows - 1) / (50 * EVAL_COLUMNS)
        again = source_average(
            np.full(50, mean), n_windows=50, window_size=EVAL_COLUMNS, n_rows=n_rows
        )
        assert again == pytest.approx(rounded_from)
        assert lowest < mean < highest
    if published > 0.3:
        assert recomputed > math.log(28_782) + 5  # far worse than guessing among all words
