"""What a run is evaluated on: validation, a part of the training split, texts by name, and, at its
end, the test split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from pentameter.checkpoint.opening import Checkpoint, find_checkpoint
from pentameter.checkpoint.state_dicts import load_model_state
from pentameter.config.schema import Config
from pentameter.data.open_dataset import open_evaluations
from pentameter.data.progress import Progress
from pentameter.data.shards.dataset import Dataset, TokenSplit, beginning
from pentameter.errors import ConfigError, CorruptError
from pentameter.evaluate.split import EvalMetrics, evaluate, evaluation_batch_size
from pentameter.train.hooks import TrainingRun

VALIDATION, TRAIN, TEST = "val", "train", "test"


def splits_to_evaluate(
    config: Config, dataset: Dataset, *, verify: bool, progress: Progress | None
) -> Mapping[str, TokenSplit]:
    """The splits that each evaluation passes over, by name: what is held out first, if anything is.

    Raises ConfigError for one in which there is nothing to predict, and what `open_dataset` raises.
    """
    if config.train.eval_interval is None:
        return {}
    splits = {}
    if (held_out := dataset.split(VALIDATION)).n_tokens >= 2:
        splits[VALIDATION] = held_out
    if config.train.eval_train_tokens is not None:
        splits[TRAIN] = beginning(dataset.split(TRAIN), config.train.eval_train_tokens)
    splits |= open_evaluations(config.data, dataset.tokenizer, verify=verify, progress=progress)
    for name, split in splits.items():
        if split.n_tokens < 2:
            raise ConfigError(
                f"the evaluation {name!r} has {split.n_tokens} tokens; at least 2 are needed to "
                "predict one from the other (data.evaluations, train.eval_train_tokens)"
            )
    return splits


def begins_with_evaluation(run: TrainingRun) -> bool:
    """True if a start of the run evaluates before its first step, which then compiles first."""
    state, interval = run.state, run.config.train.eval_interval
    assert not isinstance(interval, str)  # the plan resolved it
    return bool(run.evaluations) and state.is_due(interval, state.last_eval_step, run.plan.steps)


def evaluate_all(run: TrainingRun, should_stop: Callable[[], bool]) -> dict[str, EvalMetrics]:
    """The metrics of all of them by name; none of any where it was stopped on the way."""
    found = {}
    for name, split in run.evaluations.items():
        metrics = _evaluate(run, split, name, run.state.step, should_stop)
        if metrics is None:
            return {}
        found[name] = metrics
    return found


def evaluate_test(run: TrainingRun, should_stop: Callable[[], bool]) -> EvalMetrics | None:
    """The metrics of the test split, by the weights of the best checkpoint where one is kept, else
    by the last ones, which are the engine's afterwards in either case.

    None where nothing is held out for it, evaluation is switched off, the batches are no tokens, or
    it was stopped.
    """
    split, state = run.dataset.split(TEST), run.state
    is_off = run.config.train.eval_interval is None or not run.batches.are_tokens
    if split.n_tokens < 2 or is_off:
        return None
    run.world.progress.note("testing", state.step)
    last = best = None
    if state.best_step != state.step:  # the best may not have been saved, on a full disk
        last = _saved(run, state.step)
        best = _saved(run, state.best_step) or _saved(run, state.saved_best_step)
    if last is None or best is None:
        return _evaluate(run, split, TEST, state.step, should_stop)
    load_model_state(run.engine.models, best.tensors("model"), run.world)
    metrics = _evaluate(run, split, TEST, best.step, should_stop)
    load_model_state(run.engine.models, last.tensors("model"), run.world)
    return metrics


def _evaluate(
    run: TrainingRun, split: TokenSplit, name: str, step: int, should_stop: Callable[[], bool]
) -> EvalMetrics | None:
    return evaluate(
        run.engine,
        split,
        name=name,
        step=step,
        batch_size=evaluation_batch_size(run.plan),
        should_stop=should_stop,
    )


def _saved(run: TrainingRun, step: int | None) -> Checkpoint | None:
    """The run's checkpoint of a step, as the main process finds it; None where it is not whole."""
    folder = run.folder

    def find() -> Checkpoint | None:
        with suppress(CorruptError):
            return find_checkpoint(
                folder.store.folder,
                lambda _, manifest: (manifest.run_id, manifest.step) == (folder.run_id, step),
                folder.store.warnings,
            )
        return None

    return run.world.on_main(find)
