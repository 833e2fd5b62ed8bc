"""Setting up a run: from its configuration to data, Plan, run folder, engine, optimizer and state.

What needs no run folder comes first (data, Plan, device, memory), so that most mistakes are
refused before anything is written.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from pentameter.checkpoint.hugging_face.tokenizer_files import gpt2_beside
from pentameter.checkpoint.state_dicts import load_model_state, load_optimizer_state
from pentameter.config.schema import DataConfig
from pentameter.data.batches.step import TrainingBatches, training_batches
from pentameter.data.corpora.registry import corpus_text
from pentameter.data.open_dataset import open_dataset
from pentameter.data.shards.dataset import Dataset
from pentameter.disk.lock import RunLock
from pentameter.errors import ConfigError, StorageError
from pentameter.optim.build import AnyOptimizer, build_optimizer
from pentameter.parallel.assemble import assemble
from pentameter.parallel.compute import Compute, choose_compute
from pentameter.parallel.engine import Engine
from pentameter.parallel.muon import ShardedMuon
from pentameter.planning.plan import Plan, make_plan
from pentameter.processes.world import World
from pentameter.train.console import Console, size
from pentameter.train.continuing import Request, plan_run, saved_layout
from pentameter.train.log_files import MetricsLog
from pentameter.train.precheck import check_run
from pentameter.train.recorder import Recorder
from pentameter.train.run_folder import RunFolder, open_run_folder
from pentameter.train.saving import RunCheckpoints
from pentameter.train.state import TrainState, saved_state
from pentameter.train.trackers import open_trackers, require_trackers


@dataclass(frozen=True)
class Start:
    """A run that has been set up: everything that its loop works with."""

    plan: Plan
    dataset: Dataset
    batches: TrainingBatches
    sample_prompt: str
    compute: Compute
    folder: RunFolder
    engine: Engine
    optimizer: AnyOptimizer
    state: TrainState
    checkpoints: RunCheckpoints
    recorder: Recorder | None
    """None in every process but the main one."""


def start_run(request: Request, console: Console, stack: ExitStack) -> Start:
    """Set up the run that is asked for, rewound to where it continues, and introduce it.

    The main process holds the run folder's lock until `stack` is closed. Collective. Raises the
    errors of `pentameter.errors` for a configuration, data, a machine or a folder that cannot be.
    """
    world = request.world
    plan, dataset, batches, sample_prompt, compute = _prepare(request, console)
    world.on_main(lambda: _lock(request, stack))
    folder = open_run_folder(request, plan, dataset)
    engine, optimizer, state = _build(plan, compute, folder, world)
    metrics = MetricsLog(folder.metrics_path, console.say)
    stack.callback(metrics.close)
    checkpoints = RunCheckpoints(
        store=folder.store,
        engine=engine,
        optimizer=optimizer,
        state=state,
        dataset=dataset,
        log_ends=lambda: {**metrics.sync(), "log_bytes": console.sync()},
        say=console.say,
        last_step=state.step,
    )
    checkpoints.prune()  # what a kill between a save and its pruning left
    if folder.initial_weights is not None:
        for warning in folder.initial_weights.warnings:
            console.say(f"warning: {warning}")
    console.open_log(folder.log_path_of(world.rank))
    recorder = None
    if world.is_main:
        try:
            folder.write_environment(compute.environment())
        except StorageError as error:
            console.say(f"warning: {error}. Training goes on")
        recorder = Recorder(metrics, open_trackers(plan.config, folder, state.step, console.say))
    start = Start(
        plan,
        dataset,
        batches,
        sample_prompt,
        compute,
        folder,
        engine,
        optimizer,
        state,
        checkpoints,
        recorder,
    )
    for line in _describe(start):
        console.say(line)
    checkpoints.say_warnings()
    return start


def _prepare(
    request: Request, console: Console
) -> tuple[Plan, Dataset, TrainingBatches, str, Compute]:
    """What needs no run folder: the Plan, the data, its batches, the prompt of samples, and what
    the run computes on."""
    config, world = request.config, request.world
    warnings: list[str] = []
    dataset = open_dataset(
        config.data,
        tokenizer=gpt2_beside(config.data.tokenizer, request.init_from, request.run_dir),
        verify=world.local_rank == 0,
        progress=console.progress,
        warnings=warnings,
    )
    batches = training_batches(config, dataset.split("train"))
    plan_of = partial(
        make_plan,
        vocab_size=dataset.vocab_size,
        rows_per_epoch=batches.rows_per_epoch,
        world_size=world.size,
        local_size=world.local_size,
    )
    plan = plan_run(request, plan_of)
    sample_prompt = config.train.sample_prompt
    try:
        dataset.tokenizer.encode(sample_prompt)
    except ConfigError as error:  # a preset's prompt need not suit the user's text
        warnings.append(f"train.sample_prompt is left out: {error}")
        sample_prompt = ""
    compute = choose_compute(plan, world)
    warnings += check_run(plan, dataset, batches, compute.device, world.local_size)
    console.warn(warnings)
    return plan, dataset, batches, sample_prompt, compute


def _lock(request: Request, stack: ExitStack) -> None:
    """Lock the run folder in the main process, once all that needs no folder is known."""
    require_trackers(request.config.log)  # only this process has any
    stack.enter_context(RunLock(request.run_dir / "run.lock"))


def _build(
    plan: Plan, compute: Compute, folder: RunFolder, world: World
) -> tuple[Engine, AnyOptimizer, TrainState]:
    """The engine and the optimizer, with the tensors of the checkpoint from which the run goes on
    or of the model that it begins with, and the state to go on from.

    Each process reads its own part, whatever layout the checkpoint was written on. Collective.
    """
    engine = assemble(
        plan, compute.device, compute.precision, compiled=compute.compiled, world=world
    )
    optimizer = build_optimizer(
        engine.named_parameters(), plan.table, plan.config.optimizer, ShardedMuon
    )
    if folder.initial_weights is not None:
        folder.initial_weights.load_into(engine.models)
    checkpoint = folder.checkpoint
    if checkpoint is None:
        return engine, optimizer, TrainState()
    state, _ = saved_state(checkpoint)
    load_model_state(engine.models, checkpoint.tensors("model"), world)
    load_optimizer_state(
        optimizer, engine.named_parameters(), checkpoint.tensors("optimizer"), world
    )
    if state.last_eval_step == state.step:  # which proved it, when its state was written already
        state.proved_step = state.step
    if state.step == plan.config.schedule.start_step:  # extended here: patience starts anew
        state.evals_without_best = 0
    return engine, optimizer, state


def _describe(run: Start) -> list[str]:
    """The lines with which a run introduces itself before its first step."""
    plan, compute, config = run.plan, run.compute, run.plan.config
    model, data = config.model, config.data
    source = data.corpus or data.path
    splits = ", ".join(
        f"{name} {run.dataset.split(name).n_tokens:,}"
        for name in ("train", "val", "test")
        if run.dataset.split(name).n_tokens
    )
    micro = ""
    if plan.n_micro_batches > 1:
        micro = f" in {plan.n_micro_batches} micro-batches of {plan.micro_batch_size}"
    lines = [
        f"{config.name} · seed {config.seed} · {run.folder.path}",
        f"model   {plan.n_parameters:,} parameters · {model.n_layers} layers × {model.d_model} · "
        f"{model.n_heads} heads · context {model.context_length}",
        f"data    {source}{_left_out(data)} · {run.dataset.tokenizer.kind} tokens: {splits} · "
        f"vocabulary {model.vocab_size:,}",
        f"run     {plan.steps:,} steps × {plan.tokens_per_step:,} tokens{micro} = "
        f"{plan.total_tokens:,} tokens{_epochs(plan)}",
        f"device  {compute.device_name} · {compute.precision} ({compute.precision_reason}) · "
        f"{'compiled' if compute.compiled else 'eager'} ({compute.compile_reason})",
    ]
    if plan.layout.world_size > 1:
        plural = "s" if compute.n_threads > 1 else ""
        lines += [
            f"layout  {plan.layout} · {compute.n_threads} thread{plural} a process",
            *_stages(plan),
        ]
    if run.folder.initial_weights is not None:
        lines.append(f"init    the weights of {run.folder.initial_weights.path}")
    if run.state.step:
        assert run.folder.checkpoint is not None  # which the state was read from
        saved = saved_layout(run.folder.checkpoint)
        other = "" if saved.degrees() == plan.layout.degrees() else f", saved by {saved}"
        lines.append(f"resume  from step {run.state.step}{other}")
    start = config.schedule.start_step
    if start:
        lines.append(f"extend  the schedule begins anew at step {start}, up to step {plan.steps}")
    if compute.compiled:
        lines.append(
            "the first step compiles: about a minute on a new machine, seconds once cached"
        )
    return lines


def _epochs(plan: Plan) -> str:
    """The passes over the training split that a run makes, in words; empty where unknown."""
    if not plan.rows_per_epoch:
        return ""
    n_epochs = plan.steps * plan.batch_size / plan.rows_per_epoch
    return f" = {n_epochs:,.3g} epochs"


def _left_out(data: DataConfig) -> str:
    """The share of the text that is read, in words; empty where all of it is.

    The size of the whole is that of its files: of JSONL and compressed text about what it holds.
    """
    if data.max_bytes is None:
        return ""
    whole = corpus_text(data.model_copy(update={"max_bytes": None})).n_bytes
    if whole <= data.max_bytes:
        return ""
    return f" · reads {size(data.max_bytes)} of {size(whole)} (data.max_bytes)"


def _stages(plan: Plan) -> list[str]:
    """The layers that the ranks of each pipeline stage hold, a line for each."""
    layout = plan.layout
    if layout.pipeline == 1:
        return []
    lines = []
    for index in range(layout.pipeline):
        ranges = [plan.stages[stage] for stage in layout.stages_of(index)]
        layers = ", ".join(f"{stage.start}-{stage.stop - 1}" for stage in ranges)
        ranks = [
            rank
            for rank in range(layout.world_size)
            if layout.coordinates(rank)["pipeline"] == index
        ]
        span = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
        lines.append(f"        rank {span}: layers {layers}")
    return lines
