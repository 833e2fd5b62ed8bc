"""Setting up a run: from its configuration to data, Plan, run folder, engine, optimizer and state;
what is refused before its first step, and what is warned of.

What needs no run folder comes first (data, Plan, device, memory), so that most mistakes are
refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from pentameter.checkpoint.hugging_face.tokenizer_files import gpt2_beside
from pentameter.checkpoint.state_dicts import load_model_state, load_optimizer_state
from pentameter.config.data_schema import DataConfig
from pentameter.data.batches.step import TrainingBatches, suited_to, training_batches
from pentameter.data.corpora.registry import corpus_text
from pentameter.data.open_dataset import open_dataset
from pentameter.data.shards.dataset import Dataset
from pentameter.data.tokenizers.char import CharTokenizer, advice_on
from pentameter.disk.lock import RunLock
from pentameter.errors import ConfigError, StorageError
from pentameter.generation.loop import Prompt, question_prompt, text_prompt
from pentameter.machine.capabilities import memory_bytes
from pentameter.parallel.assemble import assemble
from pentameter.parallel.compute import choose_compute
from pentameter.planning.cluster import CONTEXT_BYTES
from pentameter.planning.plan import Plan, make_plan
from pentameter.planning.search import settings_that_fit
from pentameter.train.continuing import Request, plan_run, saved_layout
from pentameter.train.evaluations import begins_with_evaluation, splits_to_evaluate
from pentameter.train.hooks import TrainingRun
from pentameter.train.recorder import Recorder
from pentameter.train.run_folder import open_run_folder
from pentameter.train.saving import RunCheckpoints
from pentameter.train.state import TrainState, saved_state
from pentameter.train.supplied import OwnBatches
from pentameter.train.trackers import require_trackers
from pentameter.wording import size

FEW_WINDOWS = 8
"""Contexts (model.context_length tokens) that a validation split should have to be relied on."""

MOSTLY_PADDING = 0.5
"""The part of a row's tokens below which a run is told of its padding."""

MANY_PASSES = 10
"""Passes over the text from which on a small model without dropout may overfit."""


def start_run(
    run: TrainingRun, request: Request, stack: ExitStack
) -> tuple[RunCheckpoints, Recorder]:
    """Fill in `run`, the one that is asked for, rewound to where it continues, and introduce it.

    Returns its checkpoints, and what records its events. The main process holds the run folder's
    lock until `stack` is closed. Collective. Raises the errors of `pentameter.errors` for a
    configuration, data, a machine or a folder that cannot be.
    """
    console, world = run.console, run.world
    request = _prepare(run, request)

    def lock() -> None:
        require_trackers(request.config.log)  # only this process has any
        stack.enter_context(RunLock(request.run_dir / "run.lock"))

    world.on_main(lock)  # once all that needs no folder is known
    folder = run.folder = open_run_folder(request, run.plan, run.dataset)
    _build(run)
    console.open_log(folder.log_path_of(world.rank), folder.check_there)
    recorder = Recorder(run)
    stack.callback(recorder.close)
    checkpoints = RunCheckpoints(run, lambda: {**recorder.sync(), "log_bytes": console.sync()})
    checkpoints.prune()  # what a kill between a save and its pruning left
    if folder.initial_weights is not None:
        for warning in folder.initial_weights.warnings:
            console.say(f"warning: {warning}")
    if world.is_main:
        try:
            folder.write_environment(run.compute.environment())
        except StorageError as error:
            console.say(f"warning: {error}. Training goes on")
    for line in _describe(run):
        console.say(line)
    checkpoints.say_warnings()
    return checkpoints, recorder


def _prepare(run: TrainingRun, request: Request) -> Request:
    """Fill in what needs no run folder: the Plan, the data, its batches, the prompt of samples, and
    what the run computes on. Returns the request, with an order of reading that suits the data."""
    config, world, supplied = request.config, run.world, request.supplied
    run.supplied = supplied
    warnings: list[str] = []
    run.dataset = open_dataset(
        config.data,
        tokenizer=gpt2_beside(config.data.tokenizer, request.init_from, request.run_dir),
        verify=world.local_rank == 0,
        progress=run.console.progress,
        warnings=warnings,
    )
    if supplied.batches is None:
        train = run.dataset.split("train")
        config = suited_to(train, config)
        request = replace(request, config=config)
        run.batches = training_batches(config, train)
    else:
        run.batches = OwnBatches(supplied.batches, config, run.dataset.vocab_size, supplied.source)
    plan_of = partial(
        make_plan,
        vocab_size=run.dataset.vocab_size,
        rows_per_epoch=run.batches.rows_per_epoch,
        world_size=world.size,
        local_size=world.local_size,
        outline_of=supplied.source.outline,
    )
    run.plan = plan_run(request, plan_of)
    run.config = run.plan.config
    _prepare_evaluations(run, warnings)
    compute = run.compute = choose_compute(run.plan, world)
    if compute.fused_dropout_obstacle is not None:
        warnings.append(
            f"model.attention_dropout={config.model.attention_dropout} writes attention's weights "
            f"out, as its kernels cannot serve here: {compute.fused_dropout_obstacle}. The result "
            "is the same, in more memory and time"
        )
    measured = compute.measured
    busy = world.broadcast(None if measured is None else measured.warning())  # each has its own
    if busy is not None:
        warnings.append(busy)
    if not request.force:
        check_device_memory(
            run.plan,
            compute.device,
            world.local_size,
            compute.precision,
            fused_dropout=compute.fused_dropout,
        )
    if config.lora.rank is not None and request.init_from is None:
        warnings.append(
            f"lora.rank={config.lora.rank} trains adapters alone, here of random weights; add "
            "--init-from MODEL"
        )
    run.console.clear()  # of the preparation of data
    run.console.warn(warnings + _misfits(run.plan, run.dataset, run.batches))
    return request


def _prepare_evaluations(run: TrainingRun, warnings: list[str]) -> None:
    """Fill in what a run is evaluated on and what its samples continue, with `warnings` of what is
    left out. Raises ConfigError for a patience without evaluations."""
    train = run.config.train
    run.evaluations = {}
    if run.batches.are_tokens:
        run.evaluations = splits_to_evaluate(
            run.config, run.dataset, verify=run.world.local_rank == 0, progress=run.console.progress
        )
    else:
        run.plan = replace(run.plan, gives_logits=False)
        if train.patience is not None:
            raise ConfigError(
                f"train.patience={train.patience} counts evaluations on the text of [data], and "
                "batches= gives something else than tokens; leave patience out"
            )
        warnings.append(
            "batches= gives something else than tokens, so nothing is evaluated or sampled on the "
            "text of [data]; a hook may call trainer.engine.evaluate"
        )
    run.prompt = _prompt(train.sample_prompt, run.dataset, warnings)
    samples = train.sample_interval is not None and run.batches.are_tokens
    if samples and not run.plan.gives_logits:
        warnings.append(
            f"nothing is sampled: the module that {run.plan.built_by} builds needs targets to run"
        )


def _prompt(text: str, dataset: Dataset, warnings: list[str]) -> Prompt:
    """What samples continue: `text`, in conversations a user's message with that text, or the
    first question that is held out. What cannot be encoded is left out, with a warning."""
    tokenizer, val = dataset.tokenizer, dataset.split("val")
    asked = None
    try:
        if dataset.has_conversations:
            split = val if len(val.first_question) else dataset.split("train")
            asked = question_prompt(tokenizer, split, text)
        return asked or text_prompt(tokenizer, text)
    except ConfigError as error:  # a preset's prompt need not suit the user's text
        warnings.append(f"train.sample_prompt is left out: {error}")
        return text_prompt(tokenizer, "")


def _misfits(plan: Plan, dataset: Dataset, batches: TrainingBatches | OwnBatches) -> list[str]:
    """Warnings, a line each, where the settings ask more of the text, or of the run's length, than
    there is. Raises ConfigError where the run waits for evaluations and nothing is held out."""
    warnings, config = [], plan.config
    train, val = dataset.split("train"), dataset.split("val")
    if isinstance(batches, TrainingBatches) and batches.tokens_per_epoch < train.n_tokens:
        warnings.append(
            f"data.order='{config.data.order}' reads {batches.tokens_per_epoch:,} of "
            f"{train.n_tokens:,} tokens: documents are cut after model.context_length="
            f"{config.model.context_length}; data.packing=true reads them whole"
        )
    if dataset.tokenizer.kind == CharTokenizer.kind:
        advice = advice_on(dataset.vocab_size, train.n_tokens)
        warnings += [] if advice is None else [advice]
    if isinstance(batches, TrainingBatches) and batches.filled_share < MOSTLY_PADDING:
        warnings.append(
            f"rows of model.context_length={config.model.context_length} are filled to "
            f"{batches.filled_share:.0%}, the rest is padding, which costs as much; "
            "data.packing=true fills them with one document after another"
        )
    evaluates = config.train.eval_interval is not None and batches.are_tokens
    asked = config.data.validation_fraction > 0 or config.data.validation_path is not None
    if evaluates and asked and val.n_tokens < 2:
        advice = (
            "use data.split_by='position', more documents, or data.validation_path"
            if config.data.split_by == "document"
            else "use a longer text, or data.validation_path"
        )
        patience = config.train.patience
        if patience is not None:
            raise ConfigError(
                f"train.patience={patience} counts evaluations, and the validation split has "
                f"{val.n_tokens} tokens; {advice}, or leave patience out"
            )
        warnings.append(f"nothing is held out, so nothing will be evaluated; {advice}")
    elif evaluates and 2 <= val.n_tokens < FEW_WINDOWS * config.model.context_length:
        warnings.append(
            f"the validation loss will be a rough measure: only {val.n_tokens:,} tokens are held "
            "out. Use a longer text, or raise data.validation_fraction="
            f"{config.data.validation_fraction}"
        )
    warmup, length = config.schedule.warmup_steps, plan.steps - config.schedule.start_step
    if 2 * warmup > length:
        warnings.append(
            f"schedule.warmup_steps={warmup} take most of the {length} steps that the schedule "
            "has: the learning rate hardly falls again. Set fewer, or train longer"
        )
    n_passes = plan.epoch(plan.steps)
    is_guarded = config.model.dropout > 0 or config.train.patience is not None
    if n_passes >= MANY_PASSES and not is_guarded:
        warnings.append(
            f"train.steps={plan.steps} read the text {n_passes} times: the model may learn it by "
            "heart, and its validation loss rise. Use more text, or fewer steps, "
            "model.dropout=0.2 or train.patience=3"
        )
    return warnings


def check_device_memory(
    plan: Plan,
    device: torch.device,
    local_size: int,
    precision: str | None = None,
    *,
    fused_dropout: bool = False,
) -> None:
    """Raise ConfigError where the peak that the Plan says exceeds the memory of the device, or what
    is offloaded that of the machine, with the nearest settings that fit. With `fused_dropout`
    kernels drop attention's weights."""
    is_gpt, offload = plan.built_by is None, plan.config.train.offload
    state = plan.weights_bytes + plan.gradients_bytes + plan.optimizer_bytes
    # Of a module of somebody's own nothing more is known.
    total = state
    if is_gpt:
        total = plan.memory(precision, fused_dropout=fused_dropout).total_bytes
    needs = [(device, total)]
    if offload:
        needs = [(torch.device("cpu"), state), (device, max(0, total - state))]
    for where, needed in needs:
        there = memory_bytes(where)
        if there is None:
            continue
        n_sharing = 1 if where.type == "cuda" else local_size
        if where.type == "cuda":
            there -= int(CONTEXT_BYTES)
        if needed * n_sharing > there:
            fitting = []
            if is_gpt and not offload:
                usable = there / n_sharing
                fitting = settings_that_fit(plan, usable, precision, fused_dropout=fused_dropout)
            raise ConfigError(_too_large(plan, where, needed, there, n_sharing, fitting))


def _too_large(
    plan: Plan,
    where: torch.device,
    needed: int,
    there: int,
    n_sharing: int,
    fitting: Sequence[str],
) -> str:
    """The refusal of a run that takes more memory than there is, with what to do."""
    whose = f"{needed / 1e9:,.1f} GB in the fullest process, and {n_sharing} share the "
    if n_sharing == 1:
        whose = f"{needed / 1e9:,.1f} GB, "
    remedy = f"{fitting[0] if fitting else ''} fits"
    if where.type == "cuda":
        remedy += ", and train.offload with parallel.zero takes less"
    if not fitting:
        offload = "train.offload with parallel.zero, " if where.type == "cuda" else ""
        remedy = (
            "choose a smaller model (--model.n-layers, --model.d-model), more processes with "
            f"parallel.zero, tensor or pipeline, {offload}or look at it with --dry-run"
        )
    return (
        f"a step of {plan.n_parameters:,} parameters, {plan.micro_batch_size} sequences at a time, "
        f"is planned to take {whose}{where.type} {'with' if n_sharing > 1 else 'has'} "
        f"{max(0, there) / 1e9:,.1f} GB; {remedy}. --force tries it all the same"
    )


def _build(run: TrainingRun) -> None:
    """Fill in the engine and the optimizer, with the tensors of the checkpoint from which the run
    goes on or of the model that it begins with, and the state to go on from.

    Each process reads its own part, whatever layout the checkpoint was written on. Collective.
    """
    plan, compute, world, supplied = run.plan, run.compute, run.world, run.supplied
    checkpoint = run.folder.checkpoint
    if checkpoint is not None:
        supplied.check_same(checkpoint, plan)
    engine = run.engine = assemble(
        plan,
        compute.device,
        compute.precision,
        compiled=compute.compiled,
        world=world,
        source=supplied.source,
        fused_dropout=compute.fused_dropout,
    )
    run.optimizer = supplied.build_optimizer(list(engine.named_parameters()), plan)
    if run.folder.initial_weights is not None:
        run.folder.initial_weights.load_into(engine.models)
    run.state = TrainState()
    if checkpoint is None:
        return
    state, _ = saved_state(checkpoint)
    load_model_state(engine.models, checkpoint.tensors("model"), world)
    load_optimizer_state(
        run.optimizer, engine.named_parameters(), checkpoint.tensors("optimizer"), world
    )
    if state.last_eval_step == state.step:  # which proved it, when its state was written already
        state.proved_step = state.step
    if state.step == plan.config.schedule.start_step:  # extended here: patience starts anew
        state.evals_without_best = 0
    run.state = state


def _describe(run: TrainingRun) -> list[str]:
    """The lines with which a run introduces itself before its first step."""
    plan, compute, config = run.plan, run.compute, run.plan.config
    model, data = config.model, config.data
    source = data.corpus or data.path or f"a blend of {len(data.sources)}"
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
        f"model   {plan.n_parameters:,} parameters · {_architecture(plan)} · context "
        f"{model.context_length}",
        f"data    {source}{_left_out(data)} · {run.dataset.tokenizer.kind} tokens: {splits} · "
        f"vocabulary {model.vocab_size:,}",
        *_sources(run),
        f"run     {plan.steps:,} steps × {plan.tokens_per_step:,} tokens{micro} = "
        f"{plan.total_tokens:,} tokens{_epochs(plan)}",
        *_learnt(run),
        f"device  {compute.device_name} · {compute.precision} ({compute.precision_reason}) · "
        f"{'compiled' if compute.compiled else 'eager'} ({compute.compile_reason})"
        f"{' · attention drops in kernels' if compute.fused_dropout else ''}",
    ]
    if plan.layout.world_size > 1:
        plural = "s" if compute.n_threads > 1 else ""
        lines += [
            f"layout  {plan.layout} · {compute.n_threads} thread{plural} a process",
            *_stages(plan),
        ]
    if config.lora.rank is not None:
        lines.append(
            f"lora    {plan.n_trained:,} parameters are trained: rank {config.lora.rank} of "
            f"{', '.join(config.lora.targets) or 'every linear layer'}"
        )
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
        first = "the first step compiles"
        if begins_with_evaluation(run):
            first = "the first evaluation and the first step compile"
        lines.append(f"{first}: about a minute on a new machine, seconds once cached")
    return lines


def _architecture(plan: Plan) -> str:
    """The model's sizes, in words, or where a module of the user's own comes from."""
    if plan.built_by is not None:
        return plan.built_by
    model = plan.config.model
    return f"{model.n_layers} layers × {model.d_model} · {model.n_heads} heads"


def _epochs(plan: Plan) -> str:
    """The passes over the training split that a run makes, in words; empty where unknown."""
    if not plan.rows_per_epoch:
        return ""
    n_epochs = plan.steps * plan.batch_size / plan.rows_per_epoch
    return f" = {n_epochs:,.3g} epochs"


def _learnt(run: TrainingRun) -> list[str]:
    """A line with the positions whose target counts in the loss; none where nearly all do."""
    if not isinstance(run.batches, TrainingBatches) or run.batches.target_share > 0.99:
        return []
    share, data = run.batches.target_share, run.config.data
    why = "the rest is padding"
    if run.dataset.has_conversations:
        why = "answers alone are" if data.packing else "answers alone are, and rows are padded"
    return [
        f"learns  {round(share * run.plan.total_tokens):,} of these tokens ({share:.1%}): {why} · "
        f"data.order={data.order!r}, data.packing={'true' if data.packing else 'false'}"
    ]


def _sources(run: TrainingRun) -> list[str]:
    """The share of each source of a blend, and how often the run passes over it, a line each."""
    if not isinstance(run.batches, TrainingBatches) or run.batches.blend is None:
        return []
    passes = run.batches.blend.passes(run.plan.steps * run.plan.batch_size)
    sources = run.config.data.sources
    total = sum(source.weight for source in sources)
    return [
        f"        {source.weight / total:6.1%} {source.corpus or source.path} · train "
        f"{part.n_tokens:,} · {n_passes:,.3g} passes"
        for source, part, n_passes in zip(
            sources, run.dataset.split("train").parts, passes, strict=True
        )
    ]


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
