"""The hook that records a run's events, and the lines a run introduces itself with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pentameter.config.schema import DataConfig
from pentameter.data.corpora.grammar import grammar_entropy_rate
from pentameter.data.corpora.registry import corpus_text
from pentameter.evaluate.split import EvalMetrics
from pentameter.planning.layout import Layout
from pentameter.planning.plan import Plan
from pentameter.train.console import size
from pentameter.train.hooks import (
    CheckpointMetrics,
    EpochMetrics,
    RunEnd,
    SampledText,
    SkippedStep,
    StepMetrics,
    is_logged,
)
from pentameter.train.log_files import MetricsLog, checkpoint_event
from pentameter.train.trackers import Trackers

if TYPE_CHECKING:
    from pentameter.train.trainer import Trainer


class Recorder:
    """Turns what the hooks report into events: lines of metrics.jsonl, and what trackers show."""

    def __init__(self, log: MetricsLog, trackers: Trackers) -> None:
        self._log, self._trackers = log, trackers

    def write(self, event: str, **values: Any) -> None:
        """Record one event everywhere."""
        self._log.write(event, **values)
        self._trackers.write(event, **values)

    def on_start(self, trainer: Trainer) -> None:
        """`start` for a new run, `resume` for one that continues."""
        plan, compute = trainer.plan, trainer.compute
        self.write(
            "start" if trainer.state.step == 0 else "resume",
            step=trainer.state.step,
            run_id=trainer.folder.run_id,
            name=trainer.config.name,
            parameters=plan.n_parameters,
            tokens_per_step=plan.tokens_per_step,
            steps=plan.steps,
            flops_per_token=plan.flops_per_token,
            device=compute.device_name,
            precision=compute.precision,
            layout=str(plan.layout),
            world_size=plan.layout.world_size,
            compiled=compute.compiled,
            ceiling_flops=compute.ceiling_flops,
            entropy_rate=_entropy_rate(trainer.config.data),
        )

    def on_step(self, trainer: Trainer, step: StepMetrics) -> None:
        """A `train` line, where the step is one to log."""
        if is_logged(step.step, trainer.config):
            self.write("train", **asdict(step))

    def on_skip(self, trainer: Trainer, skip: SkippedStep) -> None:
        """A `skip` line."""
        self.write("skip", **asdict(skip))

    def on_epoch(self, trainer: Trainer, metrics: EpochMetrics) -> None:
        """An `epoch` line."""
        self.write("epoch", **asdict(metrics))

    def on_eval(self, trainer: Trainer, metrics: EvalMetrics) -> None:
        """An `eval` line."""
        self.write("eval", **asdict(metrics))

    def on_checkpoint(self, trainer: Trainer, metrics: CheckpointMetrics) -> None:
        """A `checkpoint` line, one for a step."""
        if metrics.again:
            return
        self.write(
            "checkpoint",
            **checkpoint_event(metrics.step, metrics.path, metrics.bytes, metrics.seconds),
        )

    def on_sample(self, trainer: Trainer, sample: SampledText) -> None:
        """For the trackers alone: the run folder has samples in files of their own."""
        self._trackers.text("sample", sample.text, sample.step)

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        """An `end` line."""
        self.write("end", **asdict(end))
        self._trackers.finish(failed=False)

    def on_error(self, trainer: Trainer, error: Exception) -> None:
        """An `end` line that says what went wrong."""
        self.write("end", step=trainer.state.step, reason=f"error: {error}", seconds=None)
        self._trackers.finish(failed=True)


def _epochs(plan: Plan) -> str:
    """How many passes over the training split a run makes, in words; nothing where unknown."""
    if not plan.rows_per_epoch:
        return ""
    n_epochs = plan.steps * plan.batch_size / plan.rows_per_epoch
    return f" = {n_epochs:,.3g} epochs"


def _left_out(data: DataConfig) -> str:
    """How much of the text is read, in words; nothing where all of it is. The size of the whole
    is that of its files: of JSONL and compressed text about what it holds."""
    if data.max_bytes is None:
        return ""
    whole = corpus_text(data.model_copy(update={"max_bytes": None})).n_bytes
    if whole <= data.max_bytes:
        return ""
    return f" · reads {size(data.max_bytes)} of {size(whole)} (data.max_bytes)"


def _entropy_rate(data: DataConfig) -> float | None:
    """The lowest loss any model can reach, where the corpus is one of which that is known."""
    return grammar_entropy_rate(data.grammar) if data.corpus == "grammar" else None


def _stages(plan: Plan) -> list[str]:
    """Which layers each process of a pipeline holds, a line for each."""
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
        lines.append(f"        rank {_span(ranks)}: layers {layers}")
    return lines


def _other_layout(trainer: Trainer) -> str:
    """On which layout the checkpoint was made that the run continues from, if on another."""
    checkpoint = trainer.folder.checkpoint
    if checkpoint is None:
        return ""
    degrees: Mapping[str, Any] = checkpoint.manifest.layout
    saved = Layout(**degrees)
    same = saved.degrees() == trainer.plan.layout.degrees()
    return "" if same else f", saved by {saved}"


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _span(ranks: list[int]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def describe(trainer: Trainer) -> list[str]:
    """What a run says of itself before its first step, line by line."""
    config, plan, compute = trainer.config, trainer.plan, trainer.compute
    model, data = config.model, config.data
    source = data.corpus or data.path
    splits = ", ".join(
        f"{name} {trainer.dataset.split(name).n_tokens:,}"
        for name in ("train", "val", "test")
        if trainer.dataset.split(name).n_tokens
    )
    micro = ""
    if plan.n_micro_batches > 1:
        micro = f" in {plan.n_micro_batches} micro-batches of {plan.micro_batch_size}"
    lines = [
        f"{config.name} · seed {config.seed} · {trainer.run_dir}",
        f"model   {plan.n_parameters:,} parameters · {model.n_layers} layers × {model.d_model} · "
        f"{model.n_heads} heads · context {model.context_length}",
        f"data    {source}{_left_out(data)} · {trainer.dataset.tokenizer.kind} tokens: {splits} · "
        f"vocabulary {model.vocab_size:,}",
        f"run     {plan.steps:,} steps × {plan.tokens_per_step:,} tokens{micro} = "
        f"{plan.total_tokens:,} tokens{_epochs(plan)}",
        f"device  {compute.device_name} · {compute.precision} ({compute.precision_reason}) · "
        f"{'compiled' if compute.compiled else 'eager'} ({compute.compile_reason})",
    ]
    if plan.layout.world_size > 1:
        lines += [
            f"layout  {plan.layout} · {_threads(compute.n_threads)} a process",
            *_stages(plan),
        ]
    if trainer.folder.initial_weights is not None:
        lines.append(f"init    the weights of {trainer.folder.initial_weights.path}")
    if trainer.state.step:
        lines.append(f"resume  from step {trainer.state.step}{_other_layout(trainer)}")
    start = config.schedule.start_step
    if start:
        lines.append(f"extend  the schedule begins anew at step {start}, up to step {plan.steps}")
    if compute.compiled:
        lines.append(
            "the first step compiles: about a minute on a new machine, seconds once cached"
        )
    return lines
