"""The lines printed before a run's first step: model, data, length, device."""

from __future__ import annotations

from pentameter.config.data_schema import DataConfig
from pentameter.data.batches.step import TrainingBatches
from pentameter.data.corpora.registry import corpus_of
from pentameter.evaluate.sampled_split import SampledSplit
from pentameter.formatting import size
from pentameter.planning.plan import Plan
from pentameter.train.evaluations import SAMPLE, begins_with_evaluation
from pentameter.train.keep.resuming import saved_layout
from pentameter.train.run import TrainingRun


def introduction(run: TrainingRun) -> list[str]:
    """Return the lines printed before a run's first step: model, data, length, device, and if they
    apply layout, LoRA, initial weights, resume step and compilation."""
    plan, compute, config = run.plan, run.compute, run.plan.config
    model, data = config.model, config.data
    held = "" if data.sources else _held(run, 0)
    splits = ", ".join(
        f"{name} {run.dataset.split(name).n_tokens:,}"
        for name in ("train", "val", "test")
        if run.dataset.split(name).n_tokens
    )
    if isinstance(run.batches, TrainingBatches) and run.batches.is_growing:
        splits += "; more is tokenized meanwhile"
    micro = ""
    if plan.n_micro_batches > 1:
        micro = f" in {plan.n_micro_batches} micro-batches of {plan.micro_batch_size}"
    lines = [
        f"{config.name} · seed {config.seed} · {run.folder.path}",
        f"model   {plan.n_parameters:,} parameters{_active(plan)} · {_architecture(plan)} · "
        f"context {model.context_length}",
        f"data    {data.shown}{held}{_left_out(data)} · {run.dataset.tokenizer.kind} tokens: "
        f"{splits} · vocabulary {model.vocab_size:,}",
        *_sources(run),
        f"run     {plan.steps:,} steps × {plan.tokens_per_step:,} tokens{micro} = "
        f"{plan.total_tokens:,} tokens{_epochs(plan)}",
        *_target_tokens(run),
        *_sampled(run),
        f"device  {compute.device_name} · {compute.precision} ({compute.precision_reason}) · "
        f"{'compiled' if compute.compiled else 'eager'} ({compute.compile_reason})",
        *([f"tried   {compute.forms}"] if str(compute.forms) else []),
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
    lines += _resumed(run)
    start = config.schedule.start_step
    if start:
        lines.append(f"extend  the schedule begins anew at step {start}, up to step {plan.steps}")
    if compute.compiled and not compute.native_kernels:  # which are built by now
        first = "the first step compiles"
        if begins_with_evaluation(run):
            first = "the first evaluation and the first step compile"
        lines.append(f"{first}: about a minute on a new machine, seconds once cached")
    return lines


def _resumed(run: TrainingRun) -> list[str]:
    """Return a line with the step from which the run resumes, by which layout it was saved if by
    another, and which steps are made again; an empty list for a run that begins."""
    step, reached = run.state.step, run.folder.reached
    if not step:
        return []
    assert run.folder.checkpoint is not None  # the state was read from it
    saved = saved_layout(run.folder.checkpoint)
    line = f"resume  from step {step}"
    if saved.degrees() != run.plan.layout.degrees():
        line += f", saved by {saved}"
    if reached is not None and reached.step > step:
        line += f"; steps {step + 1} to {reached.step} are made again"
    return [line]


def _architecture(plan: Plan) -> str:
    """Return "12 layers × 768 · 12 heads", or for the user's own model the name of its function."""
    if plan.built_by is not None:
        return plan.built_by
    model = plan.config.model
    return f"{model.n_layers} layers × {model.d_model} · {model.attention.n_heads} heads"


def _active(plan: Plan) -> str:
    """Return the active parameters per token and the experts chosen, ", 5,000 active · 2 of 8
    experts a token"; empty for a model without experts."""
    model = plan.config.model
    if plan.built_by is not None or model.experts.count is None:
        return ""
    experts = model.experts
    return f", {plan.n_active:,} active · {experts.n_chosen} of {experts.count} experts a token"


def _epochs(plan: Plan) -> str:
    """Return " = 2.5 epochs" for the run's steps; empty if an epoch's length is unknown."""
    if not plan.rows_per_epoch:
        return ""
    n_epochs = plan.steps * plan.batch_size / plan.rows_per_epoch
    return f" = {n_epochs:,.3g} epochs"


def _target_tokens(run: TrainingRun) -> list[str]:
    """Return a line with the number of loss tokens, those that count in the loss; an empty list if
    more than 99% do, or if the batches come from the user's function."""
    if not isinstance(run.batches, TrainingBatches) or run.batches.target_fraction > 0.99:
        return []
    ratio, data = run.batches.target_fraction, run.config.data
    why = "the rest is padding"
    if run.dataset.has_conversations:
        why = "answers alone are" if data.packing else "answers alone are, and rows are padded"
    return [
        f"learns  {round(ratio * run.plan.total_tokens):,} loss tokens of these ({ratio:.1%}): "
        f"{why} · "
        f"data.order={data.order!r}, data.packing={'true' if data.packing else 'false'}"
    ]


def _held(run: TrainingRun, number: int) -> str:
    """Return " · 52,002 conversations, Alpaca's form" for the data set of this number; an empty
    string if it holds text, or nothing is known of it."""
    held = run.dataset.holds[number : number + 1]
    return f" · {held[0]}" if held and held[0] else ""


def _sampled(run: TrainingRun) -> list[str]:
    """Return a line with the size of the sample on which the run is evaluated; an empty list if it
    is evaluated on whole splits."""
    sample = run.evaluations.get(SAMPLE)
    if not isinstance(sample, SampledSplit):
        return []
    whole = sample.split.n_tokens
    return [
        f"eval    {sample.n_targets:,} of the {whole:,} validation tokens every "
        f"{run.config.train.eval_interval:,} steps, the same ones ({SAMPLE}); all of them at the "
        "end (val)"
    ]


def _sources(run: TrainingRun) -> list[str]:
    """Return a line for each data source in a mixture: its weight in percent, tokens, and passes
    over it; an empty list for a single source."""
    if not isinstance(run.batches, TrainingBatches) or run.batches.mixture is None:
        return []
    passes = run.batches.mixture.passes(run.plan.steps * run.plan.batch_size)
    sources = run.config.data.sources
    total = sum(source.weight for source in sources)
    return [
        f"        {source.weight / total:6.1%} {source.shown}"
        f"{_held(run, number)} · train {part.n_tokens:,} · {n_passes:,.3g} passes"
        for number, (source, part, n_passes) in enumerate(
            zip(sources, run.dataset.split("train").parts, passes, strict=True)
        )
    ]


def _left_out(data: DataConfig) -> str:
    """Return " · reads 1 GB of 5 GB" if `data.max_bytes` makes a run read only a part of the text,
    else an empty string. The total is the files' size; for JSONL and compressed text it is
    estimated."""
    if data.max_bytes is None:
        return ""
    whole = corpus_of(data.model_copy(update={"max_bytes": None})).n_bytes
    if whole <= data.max_bytes:
        return ""
    return f" · reads {size(data.max_bytes)} of {size(whole)} (data.max_bytes)"


def _stages(plan: Plan) -> list[str]:
    """Return a line for each coordinate along the pipeline, with its ranks and the layers that they
    hold; an empty list without a pipeline."""
    layout = plan.layout
    if layout.pipeline == 1:
        return []
    lines = []
    for index in range(layout.pipeline):
        ranges = [plan.stages[stage] for stage in layout.stages_of(index)]
        layers = ", ".join(f"{stage.start}-{stage.stop - 1}" for stage in ranges)
        first, n_ranks = layout.rank_of(pipeline=index), layout.world_size // layout.pipeline
        span = f"{first}-{first + n_ranks - 1}" if n_ranks > 1 else str(first)
        lines.append(f"        rank {span}: layers {layers}")
    return lines
