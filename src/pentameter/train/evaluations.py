"""The evaluations during a run: the validation split, the first tokens of the training split,
further texts and question sets, and, at the end, the test split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from pentameter.checkpoint.folders.opening import Checkpoint
from pentameter.checkpoint.state.state_dicts import load_model_state
from pentameter.config.schema import Config
from pentameter.data.batches.step import TrainingBatches
from pentameter.data.open_dataset import open_evaluations
from pentameter.data.progress import Progress
from pentameter.data.shards.dataset import Dataset, TokenSplit, first_tokens
from pentameter.errors import ConfigError, CorruptError
from pentameter.evaluate.multiple_choice import (
    EncodedQuestions,
    encode_questions,
    evaluate_multiple_choice,
    read_questions,
)
from pentameter.evaluate.split import evaluate, evaluation_batch_size
from pentameter.record.events import EvalMetrics
from pentameter.train.run import TrainingRun
from pentameter.train.user_components import CustomBatches

VALIDATION, TRAIN, TEST = "val", "train", "test"


def splits_to_evaluate(
    config: Config,
    dataset: Dataset,
    batches: TrainingBatches | CustomBatches,
    *,
    verify: bool,
    progress: Progress,
) -> Mapping[str, TokenSplit | EncodedQuestions]:
    """Return each evaluation's split or encoded questions, by name: `val` first if anything is held
    out, `train` with `train.eval_train_tokens`, and the names in `data.evaluations`. Empty if
    evaluation is off, or if `batches` (from the user's function) are not tokens: such a model does
    not run on text.

    `verify` checks the stored tokens' hashes; `progress` is called while texts are tokenized.
    Raises ConfigError for a split with fewer than 2 tokens, and CorruptError, StorageError or
    ConfigError for texts and questions that cannot be read.
    """
    if config.train.eval_interval is None or not batches.are_tokens:
        return {}
    found: dict[str, TokenSplit | EncodedQuestions] = {}
    if (held_out := dataset.split(VALIDATION)).n_tokens >= 2:
        found[VALIDATION] = held_out
    if config.train.eval_train_tokens is not None:
        found[TRAIN] = first_tokens(dataset.split(TRAIN), config.train.eval_train_tokens)
    texts = open_evaluations(config.data, dataset.tokenizer, verify=verify, progress=progress)
    for each in config.data.evaluations:
        if each.multiple_choice is None:
            found[each.name] = texts[each.name]
        else:
            questions = read_questions(Path(each.multiple_choice))
            found[each.name] = encode_questions(
                questions, dataset.tokenizer, config.model.context_length
            )
    for name, evaluated in found.items():
        if isinstance(evaluated, TokenSplit) and evaluated.n_tokens < 2:
            raise ConfigError(
                f"the evaluation {name!r} has {evaluated.n_tokens} tokens; at least 2 are needed "
                "to predict one from the other (data.evaluations, train.eval_train_tokens)"
            )
    return found


def begins_with_evaluation(run: TrainingRun) -> bool:
    """Return True if this process evaluates before its first step, so that the evaluation is what
    is compiled first."""
    state, interval = run.state, run.config.train.eval_interval
    assert not isinstance(interval, str)  # resolved by the plan
    return bool(run.evaluations) and state.is_due(interval, state.last_eval_step, run.plan.steps)


def evaluate_all(run: TrainingRun, should_stop: Callable[[], bool]) -> dict[str, EvalMetrics]:
    """Evaluate everything in `run.evaluations`, and return the metrics by name. If `should_stop`
    returns True on the way, return an empty dict. Collective."""
    found = {}
    for name, evaluated in run.evaluations.items():
        metrics = _evaluate(run, evaluated, name, run.state.step, should_stop)
        if metrics is None:
            return {}
        found[name] = metrics
    return found


def evaluate_test(run: TrainingRun, should_stop: Callable[[], bool]) -> EvalMetrics | None:
    """Evaluate the test split with the weights that `sample` and `eval` would open (the best
    checkpoint's, else the last). The engine has its last weights again afterwards. Collective.

    Returns None if no test split is held out, evaluation is off, the batches are not tokens, or
    `should_stop` returned True.
    """
    split, state = run.dataset.split(TEST), run.state
    is_off = run.config.train.eval_interval is None or not run.batches.are_tokens
    if split.n_tokens < 2 or is_off:
        return None
    run.world.activity.note("testing", state.step)
    last = best = None
    if state.best_step != state.step:
        verification = run.folder.store.verification
        last, best = verification.on_main(lambda: _last_and_best(run), "testing", state.step)
    if last is None or best is None or best.step == last.step:
        return _evaluate(run, split, TEST, state.step, should_stop)
    load_model_state(run.engine.models, best.tensors("model"), run.world)
    metrics = _evaluate(run, split, TEST, best.step, should_stop)
    load_model_state(run.engine.models, last.tensors("model"), run.world)
    return metrics


def _evaluate(
    run: TrainingRun,
    evaluated: TokenSplit | EncodedQuestions,
    name: str,
    step: int,
    should_stop: Callable[[], bool],
) -> EvalMetrics | None:
    work: Callable[..., EvalMetrics | None]
    if isinstance(evaluated, EncodedQuestions):
        row_length = run.engine.source.row_length(run.plan, evaluated.longest)
        work = partial(evaluate_multiple_choice, run.engine, evaluated)
    else:
        row_length = run.config.model.context_length
        work = partial(evaluate, run.engine, evaluated)
    batch_size = evaluation_batch_size(run.plan, row_length)
    return work(name=name, step=step, batch_size=batch_size, should_stop=should_stop)


def _last_and_best(run: TrainingRun) -> tuple[Checkpoint | None, Checkpoint | None]:
    """Return two checkpoints: the one saved at the run's current step, and the one with the best
    validation loss (the newest one if no loss was recorded). Each is None if it is missing or
    incomplete."""
    store, last, best = run.folder.store, None, None
    with suppress(CorruptError):
        last = store.at(run.state.step)
    with suppress(CorruptError):
        best = store.best()
    return last, best
