"""The Plan: everything that follows from a configuration. Each derived number is born here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal

from pentameter.config.choices import DECAY_KEYS, MOMENTUM, look_up, refuse_unknown
from pentameter.config.schema import Config, ModelConfig, OptimizerConfig, ScheduleConfig
from pentameter.errors import ConfigError
from pentameter.planning.adapters import check_adapters, is_of_adapter
from pentameter.planning.architecture import (
    ParameterSpec,
    embedding_dropout,
    feed_forward_width,
    padded_vocab_size,
    parameter_table,
)
from pentameter.planning.batch_sizes import global_batch_size, micro_batch_size
from pentameter.planning.costs import end_weights, padding_elements, step_sizes
from pentameter.planning.layout import Layout, make_layout, stage_layers
from pentameter.planning.layout_checks import (
    check_layout,
    check_micro_batches,
    check_passes,
    check_places,
)
from pentameter.planning.memory import Memory, StateBytes, state_bytes, step_memory
from pentameter.planning.outline import (
    ModelOutline,
    check_own_layout,
    check_tied_copies,
    outline_of_gpt,
    tied_parameters,
)
from pentameter.planning.rules import LayoutRules
from pentameter.planning.timeline import planned_bubble
from pentameter.planning.traffic import StepTraffic, busiest, by_dimension, step_traffic
from pentameter.wording import size, whole

UNKNOWN_EPOCH = 1 << 40
"""Rows that stand in for an epoch that nobody could count."""
DEFAULT_STEPS = 1000  # of a configuration that names neither steps nor epochs
AUTO_INTERVALS = (1000, 500, 200, 100, 50, 20, 10, 5, 2, 1)
"""Steps between evaluations that `auto` chooses from, as a person would."""


@dataclass(frozen=True)
class Plan:
    """Everything a run obeys. `config` is resolved: nothing in it is left to be derived.

    Of a module of somebody's own, activations, messages and the idle time of a pipeline are not
    known, and left out.
    """

    config: Config
    layout: Layout
    table: tuple[ParameterSpec, ...]
    stages: tuple[range, ...]
    stage_names: tuple[frozenset[str], ...]
    """Names of the parameters of each stage."""
    built_by: str | None
    """The function that builds a module of somebody's own; None for the built-in GPT."""
    gives_logits: bool
    """Whether text can be sampled from the model."""
    vocab_size_padded: int
    n_parameters: int
    n_parameters_padded: int
    """Those of the model; `n_trained` are trained, which may be adapters' beside them."""
    rows_per_epoch: int | None
    """Rows of the training split; None where the plan was made without the data."""
    batch_size: int
    micro_batch_size: int
    n_micro_batches: int
    tokens_per_step: int
    total_tokens: int
    flops_per_token: int | None
    """None of a module whose FLOPs could not be counted."""
    flops_convention: str
    planned_memory: Memory | StateBytes
    """The fullest process's, in the configuration's own precision, dropped attention weights
    written out: what another precision, or a GPU, makes of it says `memory`."""
    asked_micro_batch_size: int | None

    @property
    def portable_config(self) -> Config:
        """`config` without what was derived from the layout, to be loaded on another one."""
        train = self.config.train.model_copy(
            update={"micro_batch_size": self.asked_micro_batch_size}
        )
        return self.config.model_copy(update={"train": train})

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        assert self.config.train.steps is not None  # resolved
        return self.config.train.steps

    @property
    def n_trained(self) -> int:
        """Parameters that the optimizer updates, padding included."""
        return sum(spec.n_elements for spec in self.table if spec.is_trained)

    def epoch(self, step: int) -> int:
        """Whole passes over the training split that `step` completed steps have made."""
        return step * self.batch_size // self.rows_per_epoch if self.rows_per_epoch else 0

    @property
    def has_known_length(self) -> bool:
        """Whether the steps of the run are known, and not counted in UNKNOWN_EPOCH."""
        in_epochs = self.steps * self.batch_size >= UNKNOWN_EPOCH >> 10
        return self.rows_per_epoch != UNKNOWN_EPOCH or not in_epochs

    @property
    def weights_bytes(self) -> int:
        """Bytes of the fullest process's weights."""
        return self.planned_memory.weights_bytes

    @property
    def gradients_bytes(self) -> int:
        """Bytes of the fullest process's gradients, from one micro-batch to the next."""
        return self.planned_memory.gradients_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the fullest process's optimizer state."""
        return self.planned_memory.optimizer_bytes

    @property
    def rules(self) -> LayoutRules:
        """Who sums gradients and when, and how long gathered weights stay."""
        return LayoutRules(self.layout)

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """The parameters that several stages have, and the coordinates along `pipeline` that hold
        them, in the order of the stages: the first owns it, others have a copy."""
        return tied_parameters(self.layout, self.stage_names)

    @property
    def least_flops_per_token(self) -> int:
        """`flops_per_token`, or where nobody counted them those of one product with each parameter,
        for choices that need a number."""
        return self.flops_per_token or 6 * self.n_parameters

    @property
    def bubble_fraction(self) -> float | None:
        """Idle time of a pipeline's processes ÷ the time they compute; 0 without a pipeline."""
        if self.layout.pipeline == 1:
            return 0.0
        if self.built_by is not None:
            return None
        return planned_bubble(self.config, self.layout, self.stages, self.n_micro_batches)

    def memory(self, precision: str | None = None, *, fused_dropout: bool = False) -> Memory:
        """Bytes that the fullest process holds; `precision` is the run's, where the configuration
        leaves it open, and `fused_dropout` whether a GPU's kernels drop attention's weights. Raises
        ConfigError for a module of somebody's own."""
        if not isinstance(self.planned_memory, Memory):
            raise ConfigError(f"the activations of the module of {self.built_by} are not known")
        if precision is None and not fused_dropout:
            return self.planned_memory
        parts = (self.config, self.layout, self.stages, precision)
        return step_memory(*parts, fused_dropout=fused_dropout)

    def traffic(self, rank: int = 0, precision: str | None = None) -> StepTraffic:
        """Calls and bytes that a rank sends and receives in a step, by (dimension, kind). Raises
        ConfigError for a module of somebody's own."""
        if self.built_by is not None:
            raise ConfigError(f"the messages of the module of {self.built_by} are not known")
        return step_traffic(self.config, self.layout, self.stages, rank, precision)

    def in_words(self) -> str:
        """The model and its layout, the memory and the length of the run, a line each."""
        steps, memory = self.steps if self.has_known_length else None, ""
        if isinstance(self.planned_memory, Memory):
            memory = f"memory  {size(self.planned_memory.total_bytes)} in the fullest process\n"
        return (
            f"{self.config.name}: {self.n_parameters:,} parameters, {self.layout}, micro-batch "
            f"{self.micro_batch_size} × {self.n_micro_batches}\n{memory}"
            f"run     {whole(steps)} steps × {whole(self.tokens_per_step)} tokens"
        )

    def to_json(self) -> dict[str, Any]:
        """The Plan as `train --dry-run` prints it and a run folder's plan.json holds it; null is
        what is not known of a module of somebody's own."""
        flops, sent = self.flops_per_token, None
        if self.built_by is None:
            sent = by_dimension(busiest(self.config, self.layout, self.stages))
        return {
            "model": {
                "built_by": self.built_by,
                "parameters": self.n_parameters,
                "parameters_padded": self.n_parameters_padded,
                "trained_parameters": self.n_trained,
                "vocab_size_padded": self.vocab_size_padded,
                "flops_per_token": flops,
                "flops_convention": self.flops_convention,
            },
            "layout": {**self.layout.to_json(), "world_size": self.layout.world_size},
            "stages": [[stage.start, stage.stop] for stage in self.stages],
            "batch": {
                "tokens_per_step": self.tokens_per_step,
                "batch_size": self.batch_size,
                "micro_batch_size": self.micro_batch_size,
                "n_micro_batches": self.n_micro_batches,
            },
            "steps": self.steps,
            "rows_per_epoch": self.rows_per_epoch,
            "total_tokens": self.total_tokens,
            "total_flops": None if flops is None else self.total_tokens * flops,
            "memory": asdict(self.planned_memory),
            "communication": sent,
            "time": {"bubble_fraction": self.bubble_fraction},
        }


def make_plan(
    config: Config,
    vocab_size: int | None = None,
    rows_per_epoch: int | None = None,
    *,
    world_size: int | None = None,
    local_size: int | None = None,
    outline_of: Callable[[Config], ModelOutline] = outline_of_gpt,
) -> Plan:
    """The Plan of `config`, for the built-in GPT or the model that `outline_of` outlines.

    `vocab_size` is the tokenizer's, and needed when the configuration does not state one;
    `rows_per_epoch` counts the rows of the training split, and is needed where the configuration
    counts in epochs. There are `world_size` processes (as many as `[parallel]` names when absent),
    `local_size` of them in each machine. Raises ConfigError where the numbers cannot be (a batch
    that does not divide, a vocabulary smaller than the tokenizer's), naming the nearest that can.
    """
    layout = make_layout(config.parallel, world_size)
    asked = config.train.micro_batch_size
    config = _resolve(config, vocab_size, rows_per_epoch, layout)
    model, train = config.model, config.train
    check_passes(layout, train)
    outline = outline_of(config)
    is_gpt = outline.built_by is None
    if is_gpt:
        check_layout(layout, model, local_size)
        layout = layout.for_model(model)
        check_adapters(config.lora, layout)
    else:
        check_places(layout, model, local_size)
        check_own_layout(layout, config, outline)
    n_parameters, n_padded = _parameter_counts(model, outline)
    assert train.batch_size is not None
    assert train.steps is not None
    tokens_per_step = train.batch_size * model.context_length
    ends = end_weights(config) if is_gpt else (0.0, 0.0)
    stages = stage_layers(model.n_layers, layout.n_stages, *ends)
    stage_names = outline.names_of_stages(stages)
    sizes = step_sizes(config, layout)
    check_micro_batches(layout, sizes.n_micro_batches, sizes.micro_batch_size)
    if is_gpt:
        planned_memory: Memory | StateBytes = step_memory(config, layout, stages)
    else:
        check_tied_copies(layout, tied_parameters(layout, stage_names), stage_names)
        tables = [[spec for spec in outline.table if spec.name in own] for own in stage_names]
        planned_memory = state_bytes(config, layout, tables)
    return Plan(
        config=config,
        layout=layout,
        table=outline.table,
        stages=stages,
        stage_names=stage_names,
        built_by=outline.built_by,
        gives_logits=outline.gives_logits,
        vocab_size_padded=padded_vocab_size(model),
        n_parameters=n_parameters,
        n_parameters_padded=n_padded,
        rows_per_epoch=rows_per_epoch,
        batch_size=train.batch_size,
        micro_batch_size=sizes.micro_batch_size,
        n_micro_batches=sizes.n_micro_batches,
        tokens_per_step=tokens_per_step,
        total_tokens=tokens_per_step * train.steps,
        flops_per_token=outline.flops_per_token,
        flops_convention=outline.flops_convention,
        planned_memory=planned_memory,
        asked_micro_batch_size=asked,
    )


def _parameter_counts(model: ModelConfig, outline: ModelOutline) -> tuple[int, int]:
    """Parameters of a model, adapters' left out: without rows that pad the vocabulary, and with."""
    if outline.built_by is not None:
        n = sum(spec.n_elements for spec in outline.table if not is_of_adapter(spec))
        return n, n
    n_padded = sum(spec.n_elements for spec in parameter_table(model))
    return n_padded - padding_elements(model), n_padded


def needs_data(config: Config) -> bool:
    """Whether `make_plan` must be told of the data: its vocabulary, or the length of an epoch."""
    counts_epochs = config.train.epochs is not None or config.train.eval_interval == "epoch"
    decays = look_up(DECAY_KEYS, config.schedule.name, "schedule.name", "the planner")
    decays_by_epoch = "decay_interval" in decays and config.schedule.decay_interval is None
    return config.model.vocab_size is None or counts_epochs or decays_by_epoch


def _resolve(
    config: Config, vocab_size: int | None, rows_per_epoch: int | None, layout: Layout
) -> Config:
    """`config` with every value that others imply filled in."""
    model, train = config.model, config.train
    if model.vocab_size is None and vocab_size is None:
        raise ConfigError(
            "model.vocab_size is not set and no tokenizer is at hand to take it from; set it, "
            "e.g. --model.vocab-size 50257"
        )
    if model.vocab_size is not None and vocab_size is not None and model.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} is smaller than the tokenizer's {vocab_size} "
            "tokens; leave it out to take the tokenizer's"
        )
    batch_size = global_batch_size(config)
    micro = micro_batch_size(train.micro_batch_size, batch_size, layout)
    epoch = None if rows_per_epoch is None else Fraction(rows_per_epoch, batch_size)
    steps = train.steps or DEFAULT_STEPS
    if train.epochs is not None:
        steps = _steps(train.epochs, epoch, "train.epochs")
    interval = _interval(train.eval_interval, "train.eval_interval", steps, epoch)
    return config.model_copy(
        update={
            "model": model.model_copy(
                update={
                    "vocab_size": model.vocab_size or vocab_size,
                    "d_ff": feed_forward_width(model),
                    "embedding_dropout": embedding_dropout(model),
                }
            ),
            "train": train.model_copy(
                update={
                    "steps": steps,
                    "epochs": None,
                    "batch_size": batch_size,
                    "tokens_per_step": None,
                    "micro_batch_size": micro,
                    "eval_interval": interval,
                    "sample_interval": _interval(
                        train.sample_interval, "train.sample_interval", steps, epoch
                    ),
                }
            ),
            "optimizer": config.optimizer.model_copy(
                update={"momentum": momentum(config.optimizer)}
            ),
            "schedule": _resolve_schedule(config.schedule, steps, epoch),
            "checkpoint": config.checkpoint.model_copy(
                update={"interval": config.checkpoint.interval or interval or steps}
            ),
        }
    )


def _interval(
    asked: int | Literal["auto", "epoch"] | None, key: str, n_steps: int, epoch: Fraction | None
) -> int | None:
    """Steps between two evaluations or two samples, from the value of `key`; None for never."""
    match asked:
        case "auto":
            return auto_interval(n_steps)
        case "epoch":
            return _steps(1, epoch, f"{key}='epoch'")
        case int() | None:
            return asked
        case unknown:
            refuse_unknown(unknown, key, "the planner")


def auto_interval(n_steps: int) -> int:
    """The longest round number of steps that fits into a run of `n_steps` at least five times."""
    return next((n for n in AUTO_INTERVALS if 5 * n <= n_steps), 1)


def _resolve_schedule(
    schedule: ScheduleConfig, steps: int, epoch: Fraction | None
) -> ScheduleConfig:
    """`schedule` with the numbers that the run's length implies."""
    if schedule.start_step >= steps:
        raise ConfigError(
            f"schedule.start_step={schedule.start_step} is not before the end of the run, "
            f"train.steps={steps}"
        )
    decay_steps = schedule.decay_steps or steps - schedule.start_step
    cooldown, interval = schedule.cooldown_steps, schedule.decay_interval
    used = look_up(DECAY_KEYS, schedule.name, "schedule.name", "the planner")
    if "cooldown_steps" in used:
        cooldown = cooldown or default_cooldown(decay_steps)
        longest = decay_steps - schedule.warmup_steps
        if cooldown > longest:
            raise ConfigError(
                f"schedule.cooldown_steps={cooldown} begins before the warm-up of "
                f"{schedule.warmup_steps} steps ends; at most {max(longest, 0)} of the "
                f"{decay_steps} steps are left for it"
            )
    if "decay_interval" in used:
        interval = interval or _steps(1, epoch, "schedule.decay_interval, an epoch when absent,")
    return schedule.model_copy(
        update={
            "decay_steps": decay_steps,
            "cooldown_steps": cooldown,
            "decay_interval": interval,
        }
    )


def momentum(optimizer: OptimizerConfig) -> float:
    """The momentum of SGD and Muon: their own default when it is not set."""
    if optimizer.momentum is not None:
        return optimizer.momentum
    return look_up(MOMENTUM, optimizer.name, "optimizer.name", "the planner") or 0.0


def default_cooldown(decay_steps: int) -> int:
    """Length of `wsd`'s decay where none is set: a fifth of the schedule."""
    return max(1, decay_steps // 5)


def _steps(n_epochs: int, epoch: Fraction | None, key: str) -> int:
    """Steps that complete `n_epochs` passes over the training split, rounded up."""
    if epoch is None:
        raise ConfigError(f"{key} counts in epochs, and no data is at hand to say how long one is")
    return max(1, math.ceil(n_epochs * epoch))
