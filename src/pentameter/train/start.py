"""Sets up a run from its configuration: data, Plan (all derived sizes and the layout), run folder,
engine, optimizer and state.

The steps that need no run folder come first (data, Plan, device, memory), so that most mistakes are
refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pentameter.checkpoint.hugging_face.tokenizer_files import gpt2_beside
from pentameter.config.files.command_source import with_tokenizer_beside
from pentameter.config.schema import Config
from pentameter.data.batches.step import TrainingBatches, suited_to, training_batches
from pentameter.data.open_dataset import open_dataset
from pentameter.data.shards.dataset import Dataset
from pentameter.disk.lock import Fence, RunLock
from pentameter.errors import ConfigError, StorageError, TrainingFailedError
from pentameter.generation.prompts import Prompt, question_prompt, text_prompt
from pentameter.optim.build import AnyOptimizer
from pentameter.parallel.assemble import assemble
from pentameter.parallel.engine import Engine
from pentameter.planning.plan import Plan, make_plan
from pentameter.processes.group.world import World
from pentameter.record.identity import shards_read
from pentameter.train.compute import Compute, choose_compute
from pentameter.train.evaluations import splits_to_evaluate
from pentameter.train.faults.device_memory import (
    check_device_memory,
    fit_micro_batches,
    is_out_of_memory,
    out_of_memory,
)
from pentameter.train.faults.health import check_health
from pentameter.train.keep.copying import open_copies
from pentameter.train.keep.restoring import restore_newer_copy
from pentameter.train.keep.resuming import RunRequest, plan_run
from pentameter.train.keep.run_folder import RunFolder, open_run_folder
from pentameter.train.keep.saving import RunCheckpoints, load_tensors
from pentameter.train.run import TrainingRun
from pentameter.train.say.console import Console
from pentameter.train.say.event_log import EventLog
from pentameter.train.say.introduction import introduction
from pentameter.train.say.start_warnings import (
    compute_warnings,
    disk_warnings,
    evaluation_warnings,
    settings_warnings,
)
from pentameter.train.say.trackers import require_trackers
from pentameter.train.state import TrainState, saved_state
from pentameter.train.user_components import CustomBatches, UserComponents


def start_run(
    request: RunRequest, console: Console, stack: ExitStack
) -> tuple[TrainingRun, RunCheckpoints]:
    """Set up the requested run, rewind its folder to the checkpoint that it resumes from, and print
    the introduction. Return the run and the object that saves its checkpoints.

    When `stack` is closed, it closes the data and the log, and releases the run folder's lock,
    which rank 0 holds. Collective. Raises ConfigError, CorruptError or StorageError for an invalid
    configuration, data set, machine or folder.
    """
    world = request.world
    remote = restore_newer_copy(request, console)
    config, warnings = with_tokenizer_beside(request.config, request.init_from)
    dataset = open_dataset(
        config.data,
        tokenizer=gpt2_beside(config.data.tokenizer, request.init_from, request.run_dir),
        verify=world.local_rank == 0,
        progress=console.progress,
        warnings=warnings,
        kept=shards_read(request.run_dir),
    )
    stack.callback(dataset.close)
    request, batches = _with_batches(replace(request, config=config), dataset)
    plan = _plan(request, dataset, batches)
    if isinstance(batches, TrainingBatches):
        batches.prepare(plan.steps)
    evaluations = splits_to_evaluate(
        plan.config, dataset, batches, verify=world.local_rank == 0, progress=console.progress
    )
    prompt = _prompt(plan.config, dataset, warnings)
    warnings += evaluation_warnings(plan, batches)
    plan, compute = _compute(request, plan, warnings)
    warnings += _warnings(request, plan, dataset, batches)
    console.show("")  # clear the progress of preparing data
    console.warn(warnings)

    def lock() -> Fence:
        require_trackers(plan.config.log)  # only rank 0 has any
        return stack.enter_context(RunLock(request.run_dir / "run.lock", waiting=console.say)).fence

    # After all checks that need no folder.
    folder = open_run_folder(request, plan, dataset, fence=world.on_main(lock))
    engine, optimizer, state = _build(request, plan, compute, folder)
    console.open_log(folder.log_path_of(world.rank), folder.check_ours)
    stack.callback(console.close_log, folder.check_not_taken)  # while the lock is held
    run = TrainingRun(
        plan=plan,
        supplied=request.supplied,
        dataset=dataset,
        batches=_as_begun(batches, request, dataset, folder),
        evaluations=evaluations,
        prompt=prompt,
        compute=compute,
        folder=folder,
        engine=engine,
        optimizer=optimizer,
        state=state,
        world=world,
        console=console,
        events=EventLog(plan.config, folder, state.step, world, console),
        copies=open_copies(plan.config.checkpoint, folder, remote, world),
    )
    stack.callback(run.events.close)
    checkpoints = RunCheckpoints(run, lambda: {**run.events.sync(), "log_bytes": console.sync()})
    checkpoints.old.begin(removes_later_copies=request.goes_on)
    outliers = check_health(engine)
    _introduce(run)
    console.warn(outliers)
    checkpoints.say_warnings()
    return run, checkpoints


def _with_batches(
    request: RunRequest, dataset: Dataset
) -> tuple[RunRequest, TrainingBatches | CustomBatches]:
    """Return the request, and the batches to train on; a user's function makes them if there is
    one. For conversations, the returned request has `data.order` = `documents` in place of windows.
    It also has packing if there are enough of them to fill a row, and an average one fits into a
    row."""
    config, supplied = request.config, request.supplied
    if supplied.batches is not None:
        own = CustomBatches(supplied.batches, config, dataset.vocab_size, supplied.source)
        return request, own
    train = dataset.split("train")
    config = suited_to(train, config)
    return replace(request, config=config), training_batches(config, train)


def _as_begun(
    batches: TrainingBatches | CustomBatches,
    request: RunRequest,
    dataset: Dataset,
    folder: RunFolder,
) -> TrainingBatches | CustomBatches:
    """Return the batches in the order in which the run in `folder` has read them so far: an earlier
    version of this program drew rows from a mixture of data sets in another order, and such a run
    keeps it."""
    if folder.own_keys or not (isinstance(batches, TrainingBatches) and batches.mixture):
        return batches
    return training_batches(request.config, dataset.split("train"), own_keys=False)


def _plan(request: RunRequest, dataset: Dataset, batches: TrainingBatches | CustomBatches) -> Plan:
    """Return the run's Plan: sizes, layout, schedule, everything that a run obeys. If batches are
    not tokens, its `gives_logits` is False, so that no text is sampled."""
    plan_of = partial(
        make_plan,
        vocab_size=dataset.vocab_size,
        rows_per_epoch=batches.rows_per_epoch,
        world_size=request.world.size,
        local_size=request.world.local_size,
        outline_of=request.supplied.source.outline,
    )
    plan = plan_run(request, plan_of)
    return plan if batches.are_tokens else replace(plan, gives_logits=False)


def _compute(request: RunRequest, plan: Plan, warnings: list[str]) -> tuple[Plan, Compute]:
    """Choose the device, precision and kernels, and add to `warnings`. Return the Plan too, with
    micro-batches that fit a GPU. Raises ConfigError if the run is predicted to exceed the memory,
    unless the request has `force`."""
    world = request.world
    compute = choose_compute(plan, world)
    warnings += compute_warnings(plan, compute, world)
    plan = fit_micro_batches(plan, compute, world)
    if not request.force:
        check_device_memory(plan, compute, world.local_size)
    return plan, compute


def _warnings(
    request: RunRequest, plan: Plan, dataset: Dataset, batches: TrainingBatches | CustomBatches
) -> list[str]:
    """Return warnings about settings that do not suit the run or its disk. Collective."""
    has_own = request.supplied.schedule is not None
    found = settings_warnings(plan, dataset, batches, request.init_from, own_schedule=has_own)
    folder = request.run_dir / "checkpoints"
    return found + request.world.on_main(lambda: disk_warnings(plan, folder))


def _prompt(config: Config, dataset: Dataset, warnings: list[str]) -> Prompt:
    """Return the prompt that samples continue. For plain text it is `train.sample_prompt`; for
    conversations, a user message with this text, or the first held-out question if it is empty. A
    text that cannot be encoded adds to `warnings` and leaves the prompt empty."""
    text, date = config.train.sample_prompt, config.data.template_date
    tokenizer, val = dataset.tokenizer, dataset.split("val")
    asked = None
    try:
        if dataset.has_conversations:
            split = val if len(val.first_prompt) else dataset.split("train")
            asked = question_prompt(tokenizer, split, text, date)
        return asked or text_prompt(tokenizer, text)
    except ConfigError as error:  # a preset's prompt need not suit the user's text
        warnings.append(f"train.sample_prompt is left out: {error}")
        return text_prompt(tokenizer, "")


def build_engine(
    plan: Plan, compute: Compute, world: World, supplied: UserComponents
) -> tuple[Engine, AnyOptimizer]:
    """Build the engine, with the initial weights that follow from the seed, and an optimizer
    without state for its parameters. Collective."""
    engine = assemble(
        plan,
        compute.device,
        compute.precision,
        compiled=compute.compiled,
        world=world,
        source=supplied.source,
        forms=compute.forms,
    )
    return engine, supplied.build_optimizer(list(engine.named_parameters()), plan)


def _build(
    request: RunRequest, plan: Plan, compute: Compute, folder: RunFolder
) -> tuple[Engine, AnyOptimizer, TrainState]:
    """Build the engine and the optimizer, and load the checkpoint to resume from, or set the
    initial weights. Return (engine, optimizer, state): the run's state as the checkpoint has it, or
    a new one. Each rank reads its own shards, whichever layout wrote the checkpoint. Collective."""
    world, supplied, checkpoint = request.world, request.supplied, folder.checkpoint
    if checkpoint is not None:
        start_step = plan.config.schedule.start_step
        has_schedule = folder.holds_checkpoint and checkpoint.step > start_step
        supplied.check_same(checkpoint, plan, with_schedule=has_schedule)
    with _telling_what_fits(plan, compute):
        engine, optimizer = build_engine(plan, compute, world, supplied)
        if folder.initial_weights is not None:
            folder.initial_weights.load_into(engine.models)
        if checkpoint is None:
            return engine, optimizer, TrainState()
        state, _ = saved_state(checkpoint)
        load_tensors(engine, optimizer, checkpoint, world)
    if not folder.holds_checkpoint:
        return engine, optimizer, state.for_branch()
    if state.last_eval_step == state.step:  # it showed the saved weights known good
        state.proved_step = state.step
    if state.step == plan.config.schedule.start_step:  # extended at this step: patience starts anew
        state.evals_without_best = 0
    return engine, optimizer, state


@contextmanager
def _telling_what_fits(plan: Plan, compute: Compute) -> Iterator[None]:
    """Raise TrainingFailedError with settings that fit where a model finds no memory."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingFailedError(out_of_memory(plan, compute, "before the first step")) from error


def _introduce(run: TrainingRun) -> None:
    """Write environment.json on rank 0, and print the run's introduction. Collective."""
    console, folder = run.console, run.folder
    if folder.initial_weights is not None:
        for warning in folder.initial_weights.warnings:
            console.say(f"warning: {warning}")
    if run.world.is_main:
        try:
            which_steps = {
                "step": run.state.step,
                "layout": str(run.plan.layout),
                "micro_batch_size": run.plan.micro_batch_size,
            }
            before = folder.write_environment({**run.compute.environment(), **which_steps})
            if (said := _compiled_otherwise(run, before)) is not None:
                console.say(said)
        except StorageError as error:
            console.say(f"warning: {error}. Training goes on")
    for line in introduction(run):
        console.say(line)


def _compiled_otherwise(run: TrainingRun, before: Mapping[str, Any] | None) -> str | None:
    """Return a phrase for a resumed run whose last start (`before`, its entry of environment.json)
    was compiled and this one is not, or the other way round; else None."""
    was = None if before is None else before.get("compiled")
    if run.state.step == 0 or was not in (True, False) or was == run.compute.compiled:
        return None
    how, setting = ("compiled", "true") if was else ("eager", "false")
    return (
        f"the last start of this run was {how}: from step {run.state.step} on results are rounded "
        f"otherwise; --train.compile {setting} keeps them"
    )
