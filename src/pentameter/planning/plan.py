"""The Plan: every number that a run obeys, derived once from a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import Config, ScheduleConfig
from pentameter.config.section import LARGEST_COUNT
from pentameter.errors import ConfigError
from pentameter.planning.adapters import is_of_adapter
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.batch_sizes import global_batch_size, micro_batch_size
from pentameter.planning.fused_step import fused_obstacle
from pentameter.planning.layouts.layout import Layout, make_layout, stage_layers
from pentameter.planning.layouts.layout_checks import (
    check_custom_layout,
    check_layout,
    check_micro_batches,
    check_passes,
    check_tied_within,
)
from pentameter.planning.layouts.sharding import Placement, Sharding, sharding_of
from pentameter.planning.outline import ModelOutline, outline_of_gpt, tied_parameters
from pentameter.planning.rules import LayoutRules

UNKNOWN_EPOCH = 1 << 40
"""Placeholder row count for an epoch whose length could not be counted."""
DEFAULT_STEPS = 1000  # for a configuration with neither steps nor epochs
AUTO_INTERVALS = (1000, 500, 200, 100, 50, 20, 10, 5, 2, 1)
"""Round intervals in steps between evaluations, among which `auto` chooses."""


@dataclass(frozen=True)
class Plan:
    """Everything that a run obeys: sharding, stages, batch sizes, steps. A frozen record, made by
    `make_plan`. `config` is resolved: no value in it remains to be derived.

    `batch_size` is in sequences per step over all ranks, `micro_batch_size` in sequences per
    forward pass on one rank, and `n_micro_batches` counts those passes per rank and step. The
    resulting bytes, messages and seconds are in `pentameter.estimating`.
    """

    config: Config
    layout: Layout
    table: tuple[ParameterSpec, ...]
    """The parameter table: a spec (name, shape before sharding, axes) for each parameter of the
    whole model, adapters included."""
    stages: tuple[range, ...]
    """The layer range in each pipeline stage, in stage order."""
    stage_names: tuple[frozenset[str], ...]
    """The parameter names in each pipeline stage, in stage order."""
    tied: dict[str, tuple[int, ...]]
    """Maps each parameter that several stages hold to the `pipeline` coordinates that hold it, in
    stage order: ranks at the first own the parameter, the others have a copy."""
    built_by: str | None
    """Name of the function that builds a custom model; None for the built-in GPT."""
    gives_logits: bool
    """Whether the model computes logits without targets, so that text can be sampled from it."""
    vocab_size_padded: int
    n_parameters: int
    n_parameters_padded: int
    """The model's parameter count including vocabulary padding, which `n_parameters` leaves out;
    neither counts adapters. `n_trained` counts elements that are trained, which may be the
    adapters' alone."""
    n_active: int
    """Parameters that one token is multiplied with: all except experts that the router does not
    choose for it."""
    rows_per_epoch: int | None
    """Rows in the training split; None if the plan was made without the data."""
    batch_size: int
    micro_batch_size: int
    n_micro_batches: int
    tokens_per_step: int
    total_tokens: int
    flops_per_token: int | None
    """Forward and backward FLOPs per trained token, by `flops_convention`; None for a custom model
    whose FLOPs could not be counted."""
    flops_convention: str
    causal_flops_per_token: int | None
    """`flops_per_token` without those for masked positions; None for a custom model."""
    asked_micro_batch_size: int | None
    """`train.micro_batch_size` as it was configured; None if it was left to the layout."""

    @property
    def portable_config(self) -> Config:
        """`config` with `train.micro_batch_size` as it was configured (None if it was left open)
        instead of the one derived from the layout: for loading on another layout."""
        return self.config.updated({"train.micro_batch_size": self.asked_micro_batch_size})

    def with_micro_batches(self, size: int) -> Plan:
        """Return this Plan with micro-batches of `size` sequences, as if the layout had implied
        them. Raises ConfigError if a rank's sequences are not a multiple of `size`, or the pipeline
        cannot run as many micro-batches."""
        size = micro_batch_size(size, self.batch_size, self.layout)
        n_micro_batches = self.batch_size // self.layout.n_batch_shards // size
        check_micro_batches(self.layout, n_micro_batches, size)
        config = self.config.updated({"train.micro_batch_size": size})
        return replace(self, config=config, micro_batch_size=size, n_micro_batches=n_micro_batches)

    @property
    def steps(self) -> int:
        """Optimizer steps in the run."""
        assert self.config.train.steps is not None  # resolved
        return self.config.train.steps

    @property
    def n_trained(self) -> int:
        """Elements that the optimizer updates, padding included."""
        return sum(spec.n_elements for spec in self.table if spec.is_trained)

    def epoch(self, step: int) -> int:
        """Return how many whole passes over the training split the first `step` optimizer steps
        make; 0 if the rows were not counted."""
        return step * self.batch_size // self.rows_per_epoch if self.rows_per_epoch else 0

    @property
    def has_known_length(self) -> bool:
        """Whether the step count is real. It is not if the run counts in epochs and their length
        could not be counted: it was then derived from the placeholder UNKNOWN_EPOCH, and is
        absurdly large."""
        in_epochs = self.steps * self.batch_size >= UNKNOWN_EPOCH >> 10
        return self.rows_per_epoch != UNKNOWN_EPOCH or not in_epochs

    @property
    def sharding(self) -> Sharding:
        """The Sharding (local activation shapes and parameter placements) of this model under the
        layout."""
        return sharding_of(self.layout, self.config.model)

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """Maps each parameter's name to its Placement: the mesh dimensions that shard it, and those
        that sum its gradient."""
        return {spec.name: self.sharding.placement(spec) for spec in self.table}

    @property
    def adapted_modules(self) -> list[str]:
        """Paths to the linear layers that have an adapter (LoRA); empty without adapters."""
        names = (spec.name for spec in self.table if is_of_adapter(spec))
        return list(dict.fromkeys(name.rpartition(".")[0] for name in names))

    @property
    def fused_obstacle(self) -> str | None:
        """The first setting that the fused CPU step does not support, as text for a message; None
        if it can run this plan."""
        return fused_obstacle(self.config, self.layout, self.built_by)

    @property
    def rules(self) -> LayoutRules:
        """The rules that follow from the layout: when gradients are reduced over ranks, and how
        long weights gathered from ranks are kept."""
        return LayoutRules(self.layout)

    @property
    def rounds_once(self) -> bool:
        """Whether weights are rounded to the matmul dtype once per step instead of once per
        micro-batch: with several micro-batches, if tensor, pipeline or context parallelism is used
        without ZeRO and without a grid."""
        return self.rules.rounds_once(self.n_micro_batches)

    @property
    def least_flops_per_token(self) -> int:
        """`flops_per_token`; if that could not be counted, 6 per parameter, as if each were in one
        matmul. For choices that need a number."""
        return self.flops_per_token or 6 * self.n_parameters

    def to_json(self) -> dict[str, Any]:
        """Return the Plan's figures with the keys of a run folder's plan.json; uncounted FLOPs are
        None."""
        flops = self.flops_per_token
        return {
            "model": {
                "built_by": self.built_by,
                "parameters": self.n_parameters,
                "parameters_padded": self.n_parameters_padded,
                "active_parameters": self.n_active,
                "trained_parameters": self.n_trained,
                "vocab_size_padded": self.vocab_size_padded,
                "flops_per_token": flops,
                "flops_convention": self.flops_convention,
                "causal_flops_per_token": self.causal_flops_per_token,
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
    """Return the Plan (all numbers that a run obeys) for `config`. Raises ConfigError for
    impossible numbers (a batch that does not split evenly, a vocabulary smaller than the
    tokenizer's), naming the nearest possible ones.

    vocab_size: the tokenizer's; required if the configuration does not set one.
    rows_per_epoch: rows in the training split; required if the configuration counts in epochs.
    world_size: number of ranks; None for as many as `[parallel]` implies.
    local_size: ranks per machine; None if not known.
    outline_of: returns the outline of the model (parameters, FLOPs); by default the built-in GPT's.
    """
    layout = make_layout(config.parallel, world_size)
    asked = config.train.micro_batch_size
    config = _resolve(config, vocab_size, rows_per_epoch, layout)
    model, train = config.model, config.train
    check_passes(layout, train)
    outline = outline_of(config)
    is_gpt = outline.built_by is None
    if is_gpt:
        check_layout(layout, config, local_size)
    else:
        check_custom_layout(layout, config, outline, local_size)
    assert train.batch_size is not None
    assert train.steps is not None
    assert train.micro_batch_size is not None
    tokens_per_step = train.batch_size * model.context_length
    n_micro_batches = train.batch_size // layout.n_batch_shards // train.micro_batch_size
    check_micro_batches(layout, n_micro_batches, train.micro_batch_size)
    stages = stage_layers(model.n_layers, layout.n_stages, *outline.end_weights)
    stage_names = outline.names_of_stages(stages)
    tied = tied_parameters(layout, stage_names)
    if not is_gpt:
        check_tied_within(layout, stage_names, tied)
    return Plan(
        config=config,
        layout=layout,
        table=outline.table,
        stages=stages,
        stage_names=stage_names,
        tied=tied,
        built_by=outline.built_by,
        gives_logits=outline.gives_logits,
        vocab_size_padded=model.padded_vocab_size,
        n_parameters=outline.n_parameters - outline.n_padding,
        n_parameters_padded=outline.n_parameters,
        n_active=outline.n_active - outline.n_padding,
        rows_per_epoch=rows_per_epoch,
        batch_size=train.batch_size,
        micro_batch_size=train.micro_batch_size,
        n_micro_batches=n_micro_batches,
        tokens_per_step=tokens_per_step,
        total_tokens=tokens_per_step * train.steps,
        flops_per_token=outline.flops_per_token,
        flops_convention=outline.flops_convention,
        causal_flops_per_token=outline.causal_flops_per_token,
        asked_micro_batch_size=asked,
    )


def needs_data(config: Config) -> bool:
    """Return whether `make_plan` needs facts about the data: True if `model.vocab_size` is not set,
    or if the run's length, its evaluations or its learning rate's decay count in epochs."""
    counts_epochs = config.train.epochs is not None or config.train.eval_interval == "epoch"
    schedule = config.schedule
    decays_by_epoch = "decay_interval" in schedule.decay_keys and schedule.decay_interval is None
    return config.model.vocab_size is None or counts_epochs or decays_by_epoch


def _resolve(
    config: Config, vocab_size: int | None, rows_per_epoch: int | None, layout: Layout
) -> Config:
    """Return `config` with every implied value filled in, given the tokenizer's vocabulary size and
    the rows in the training split (None if not known). Raises ConfigError if a value needs one that
    is not known, or if `model.vocab_size` is smaller than the tokenizer's."""
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
        if steps > LARGEST_COUNT and rows_per_epoch != UNKNOWN_EPOCH:
            raise ConfigError(
                f"train.epochs={train.epochs} of {rows_per_epoch:,} sequences are {steps:,} steps, "
                f"and a run has at most {LARGEST_COUNT:,}; lower it, or raise the batch"
            )
    interval = _interval(train.eval_interval, "train.eval_interval", steps, epoch)
    schedule = _resolved_schedule(config.schedule, steps, epoch)
    sample_interval = _interval(train.sample_interval, "train.sample_interval", steps, epoch)
    return config.updated(
        {
            "model.vocab_size": model.vocab_size or vocab_size,
            "model.feed_forward.width": model.feed_forward_width,
            "model.embedding_dropout": model.embedding_dropout_rate,
            "train.steps": steps,
            "train.epochs": None,
            "train.batch_size": batch_size,
            "train.tokens_per_step": None,
            "train.micro_batch_size": micro,
            "train.eval_interval": interval,
            "train.eval_tokens": _eval_tokens(config, interval, batch_size),
            "train.sample_interval": sample_interval,
            "optimizer.momentum": config.optimizer.momentum_used,
            **{f"schedule.{key}": value for key, value in schedule.items()},
            "checkpoint.interval": config.checkpoint.interval or interval or steps,
        }
    )


def _interval(
    asked: int | Literal["auto", "epoch"] | None, key: str, n_steps: int, epoch: Fraction | None
) -> int | None:
    """Return the number of steps between two evaluations, or two samples; None for never.

    asked: the configured value: a number, 'auto' (by the run's length), 'epoch' (one epoch) or
        None.
    key: its name, for messages.
    n_steps: the run's length in steps.
    epoch: an epoch's length in steps, None if not known.

    Raises ConfigError if 'epoch' is asked for and its length is not known.
    """
    match asked:
        case "auto":
            return auto_interval(n_steps)
        case "epoch":
            return _steps(1, epoch, f"{key}='epoch'")
        case int() | None:
            return asked
        case unknown:
            refuse_unknown(unknown, key, "the planner")


EVALUATION_SHARE, LEAST_EVALUATION_TOKENS = 0.02, 1 << 16
"""The FLOPs of an evaluation under `train.eval_tokens="auto"` ÷ those of the training between two,
and its least tokens, of which the loss is known to about a hundredth."""


def _eval_tokens(config: Config, interval: int | None, batch_size: int) -> int | None:
    """Return the tokens of the validation split that an evaluation reads; None for all of them.
    `interval` is the number of steps between two evaluations, None for never; a training step
    takes three times the FLOPs of an evaluation of as many tokens."""
    match config.train.eval_tokens:
        case "auto":
            if interval is None:
                return None
            between = interval * batch_size * config.model.context_length
            return max(LEAST_EVALUATION_TOKENS, round(3 * EVALUATION_SHARE * between))
        case int() | None as asked:
            return asked
        case unknown:
            refuse_unknown(unknown, "train.eval_tokens", "the planner")


def auto_interval(n_steps: int) -> int:
    """Return the largest of AUTO_INTERVALS (round step counts) that fits at least five times into
    `n_steps`; 1 if none does."""
    return next((n for n in AUTO_INTERVALS if 5 * n <= n_steps), 1)


def _resolved_schedule(
    schedule: ScheduleConfig, steps: int, epoch: Fraction | None
) -> dict[str, int | None]:
    """Return the schedule's lengths in steps, the absent ones filled in: `decay_steps` ends with
    the run; if the schedule uses them, `cooldown_steps` is a fifth of `decay_steps`, and
    `decay_interval` one epoch. `steps` is the run's length, `epoch` an epoch's length in steps
    (None if not known). Raises ConfigError if the schedule does not fit into the run."""
    if schedule.start_step >= steps:
        raise ConfigError(
            f"schedule.start_step={schedule.start_step} is not before the end of the run, "
            f"train.steps={steps}"
        )
    decay_steps = schedule.decay_steps or steps - schedule.start_step
    cooldown, interval = schedule.cooldown_steps, schedule.decay_interval
    used = schedule.decay_keys
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
    return {"decay_steps": decay_steps, "cooldown_steps": cooldown, "decay_interval": interval}


def default_cooldown(decay_steps: int) -> int:
    """Return the default length in steps for `wsd`'s decay: a fifth of the schedule."""
    return max(1, decay_steps // 5)


def _steps(n_epochs: int, epoch: Fraction | None, key: str) -> int:
    """Return the steps that complete `n_epochs` passes over the training split, rounded up; `epoch`
    is one pass in steps. Raises ConfigError, naming `key`, if it is None."""
    if epoch is None:
        raise ConfigError(
            f"{key} counts in epochs, and how long one is nobody knows: no data is at hand, or its "
            "end is not, as with data.order='streamed'; count in steps"
        )
    return max(1, math.ceil(n_epochs * epoch))
