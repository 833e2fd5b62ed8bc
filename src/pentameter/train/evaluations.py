"""The evaluations during a run: the validation split or a sample of it, the first tokens of the
training split, further texts and question sets; and at the end the test split, and the validation
split if it was sampled."""

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
from pentameter.evaluate.sampled_split import SampledSplit, sampled_split
from pentameter.evaluate.split import ends_at_documents, evaluate, evaluation_batch_size
from pentameter.record.events import EvalMetrics
from pentameter.train.run import TrainingRun
from pentameter.train.user_components import CustomBatches

Evaluated = TokenSplit | SampledSplit | EncodedQuestions
VALIDATION, SAMPLE, TRAIN, TEST = "val", "val-sample", "train", "test"


def splits_to_evaluate(
    config: Config,
    dataset: Dataset,
    batches: TrainingBatches | CustomBatches,
    *,
    verify: bool,
    progress: Progress,
) -> Mapping[str, Evaluated]:
    """Return each evaluation's split or encoded questions, by name: `val` first if anything is held
    out, or `val-sample` if that has more than `train.eval_tokens`; `train` with
    `train.eval_train_tokens`, and the names in `data.evaluations`. Empty if evaluation is off, or
    if `batches` (from the user's function) are not tokens: such a model does not run on text.

    `verify` checks the stored tokens' hashes; `progress` is called while texts are tokenized.
    Raises ConfigError for a split with fewer than 2 tokens, and CorruptError, StorageError or
    ConfigError for texts and questions that cannot be read.
    """
    if config.train.eval_interval is None or not batches.are_tokens:
        return {}
    found: dict[str, Evaluated] = {}
    if (held_out := dataset.split(VALIDATION)).n_tokens >= 2:
        sample = _sample(config, held_out)
        found |= {VALIDATION: held_out} if sample is None else {SAMPLE: sample}
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


def _sample(config: Config, held_out: TokenSplit) -> SampledSplit | None:
    """Return the sample of the validation split that `train.eval_tokens` asks for; None if it is
    not set, or if the split has no more."""
    n_tokens = config.train.eval_tokens
    assert n_tokens != "auto"  # resolved by the plan
    if n_tokens is None:
        return None
    return sampled_split(
        held_out,
        context_length=config.model.context_length,
        n_targets=n_tokens,
        within_documents=ends_at_documents(held_out, config.data),
    )


def measured_on(run: TrainingRun) -> str | None:
    """Return the name of what the run's validation loss is measured on, with the tokens of a
    sample; None if nothing is held out or evaluation is off. Two losses compare if it is equal."""
    sample = run.evaluations.get(SAMPLE)
    if isinstance(sample, SampledSplit):
        return f"{SAMPLE} of {sample.n_targets:,}"
    return VALIDATION if VALIDATION in run.evaluations else None


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


def evaluate_at_end(run: TrainingRun, should_stop: Callable[[], bool]) -> list[EvalMetrics]:
    """Evaluate with the weights that `sample` and `eval` would open (the best checkpoint's, else
    the last): the whole validation split if the run was evaluated on a sample of it, and the test
    split if one is held out. The engine has its last weights again afterwards. Collective.

    Returns an empty list if there is neither, evaluation is off, the batches are not tokens, or
    `should_stop` returned True.
    """
    state, names = run.state, [VALIDATION] if SAMPLE in run.evaluations else []
    if run.dataset.split(TEST).n_tokens >= 2:
        names.append(TEST)
    is_off = run.config.train.eval_interval is None or not run.batches.are_tokens
    if not names or is_off:
        return []
    run.world.activity.note("testing", state.step)
    last = best = None
    if state.best_step != state.step:
        verification = run.folder.store.verification
        last, best = verification.on_main(lambda: _last_and_best(run), "testing", state.step)

    def evaluate_all_at(step: int) -> list[EvalMetrics]:
        found = (_evaluate(run, run.dataset.split(n), n, step, should_stop) for n in names)
        return [metrics for metrics in found if metrics is not None]

    if last is None or best is None or best.step == last.step:
        return evaluate_all_at(state.step)
    load_model_state(run.engine.models, best.tensors("model"), run.world)
    found = evaluate_all_at(best.step)
    load_model_state(run.engine.models, last.tensors("model"), run.world)
    return found


def _evaluate(
    run: TrainingRun,
    evaluated: Evaluated,
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
