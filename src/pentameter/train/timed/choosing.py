"""The best model that this machine can train in a given time, as a configuration.

A scaling law gives the best model size for an amount of compute (`size_law.py`); a trial with real
steps measures this machine's speed. The result is an ordinary configuration: the run that trains it
depends on no clock, except for one correction of its length (`time_kept.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pentameter.config.files.load import flat_overrides
from pentameter.config.schema import Config
from pentameter.config.tables import packaged_table
from pentameter.data.corpora.registry import corpus_of
from pentameter.data.open_dataset import open_dataset
from pentameter.data.progress import Progress
from pentameter.data.shards.dataset import Dataset
from pentameter.data.shards.format import find_header
from pentameter.errors import ConfigError
from pentameter.formatting import count, duration, size
from pentameter.formatting import flops as flops_in_words
from pentameter.machine.capabilities import machine_capabilities
from pentameter.machine.choices import choose_device, choose_precision
from pentameter.machine.cores_and_memory import usable_cores
from pentameter.machine.environment import device_name
from pentameter.machine.fastest_matmul import ceiling
from pentameter.machine.peaks import peak_flops
from pentameter.parallel.precision import arithmetic
from pentameter.planning.plan import auto_interval, make_plan
from pentameter.train.timed.size_law import (
    SIZES,
    TUNING_SHARE,
    Size,
    best_rate,
    best_size,
    best_vocabulary,
    gated_width,
    sizes_within,
    step_tokens,
    tuning_rate,
)
from pentameter.train.timed.time_budget import TimeBudget
from pentameter.train.timed.trial import Pace, measure_pace

Load = Callable[[Mapping[str, Any]], Config]
"""Function from settings (dotted path → value) to the user's configuration with them; the user's
own settings take precedence."""

FEWEST_STEPS = 20
"""Steps below which a run is refused: it would hardly begin to learn."""
TRIAL_SHARE, LONGEST_TRIAL_SECONDS = 0.03, 20.0
"""Length of a trial: this fraction of the run's time, at most so many seconds."""
SECOND_TRIAL_SHARE = 0.1
"""Largest fraction of the time for a second trial, with a model size that suits the measured speed
better."""
EVALUATIONS_SHARE = 0.05
"""Largest fraction of the time for evaluations, except the first and the last."""
COOL_DOWN_SHARE, WARM_UP_SHARE = 0.4, 0.05
"""Fractions of a run in which the learning rate falls to zero, and in which it rises."""
CPU_SHARE, GPU_SHARE = 0.25, 0.3
"""Fraction of the matmul peak that training is expected to reach on a CPU, and on a GPU, before it
is measured."""
RESTART_SHARE = 0.3
"""Time of a run's first step once a trial has filled the compile cache, as a fraction of the
trial's first step."""


@dataclass(frozen=True)
class Choice:
    """The chosen settings (dotted path → value), the configuration with them, and lines to print
    that give the reasons."""

    settings: Mapping[str, Any]
    config: Config
    reasons: tuple[str, ...]


def choose_for_time(
    load: Load,
    given: Collection[str],
    budget: TimeBudget,
    *,
    sizes: bool,
    tunes: bool,
    progress: Progress,
) -> Choice:
    """Choose settings for a run that ends within the budget, by a trial on this machine.

    load: makes the configuration for given settings (dotted path → value).
    given: dotted paths that the user set, which stay as they are.
    sizes: True to choose vocabulary, model size, batch and learning rate, too, not only the length.
    tunes: True for a run that begins with a model's weights, of which it is not known what they
        bear: to choose the learning rate and its warm-up, too.
    progress: called while the data is prepared.

    Raises ConfigError if the time is too short for FEWEST_STEPS steps.
    """
    chooser = _SizeChooser if sizes else _TuningChooser if tunes else _LengthChooser
    return chooser(load, given, budget, progress).choose()


class _LengthChooser:
    """Chooses the number of steps that fit into the time, for a given model. `load` makes the
    configuration for given settings, `given` are the dotted paths that the user set, `progress` is
    called while data is prepared."""

    def __init__(
        self, load: Load, given: Collection[str], budget: TimeBudget, progress: Progress
    ) -> None:
        self._load, self._given, self._budget = load, frozenset(given), budget
        self._progress = progress
        self._settings: dict[str, Any] = {}
        self._reason: tuple[str, ...] = ()

    def choose(self) -> Choice:
        """Open the data, time some steps, and return the settings for the steps that fit. Raises
        ConfigError if they are too few."""
        config = self._load(self._without_length())
        dataset = self._open(config)
        pace = self._measure(self._with_steps(config, FEWEST_STEPS), dataset)
        return self._of_length(dataset, pace, self._reason)

    def _open(self, config: Config) -> Dataset:
        return open_dataset(config.data, progress=self._progress)

    def _without_length(self) -> dict[str, Any]:
        """Return settings (dotted path → None) that leave open how long the run and its schedule
        are, except for those that the user set."""
        return self._obeying(
            {"train.steps": None, "train.epochs": None, "schedule.decay_steps": None}
        )

    def _obeying(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of `settings` (dotted path → value) whose keys the user has not set, as what
        the user set stays."""
        return {path: value for path, value in settings.items() if path not in self._given}

    def _with_steps(self, config: Config, steps: int) -> Config:
        """Return `config` with `steps` steps, and with warm-up and cool-down that fit into them."""
        return self._load({**self._settings, **self._length(config, steps)})

    def _length(self, config: Config, steps: int) -> dict[str, Any]:
        """Return the settings (dotted path → value) for a run of `steps` steps: warm-up takes at
        most a tenth, cool-down the same fraction as in `config`, at most 0.9. Keys that the user
        set are left out."""
        schedule, before = config.schedule, config.train.steps
        found: dict[str, Any] = {
            **self._without_length(),
            "train.steps": steps,
            "schedule.warmup_steps": min(schedule.warmup_steps, steps // 10),
        }
        if schedule.cooldown_steps is not None:
            whole = schedule.decay_steps or before or steps
            share = min(0.9, schedule.cooldown_steps / whole)
            found["schedule.cooldown_steps"] = max(1, math.floor(share * steps))
        return self._obeying(found)

    def _measure(self, config: Config, dataset: Dataset) -> Pace:
        seconds = min(LONGEST_TRIAL_SECONDS, TRIAL_SHARE * self._budget.seconds)
        return measure_pace(config, dataset, seconds)

    def _of_length(self, dataset: Dataset, pace: Pace, reasons: tuple[str, ...]) -> Choice:
        """Return the Choice of as many steps as fit into the time left, given the measured `pace`
        (seconds per step and per evaluation). `reasons` are lines to print, to which one about the
        steps is appended. Raises ConfigError if fewer than FEWEST_STEPS fit."""
        budget, config = self._budget, self._load({**self._settings, **self._without_length()})
        closing = budget.closing_seconds + pace.evaluation_seconds
        left = budget.left - closing - pace.evaluation_seconds  # the first
        left -= RESTART_SHARE * pace.first_seconds
        interval = config.train.eval_interval
        steps = math.floor(left / pace.step_seconds)
        if steps >= FEWEST_STEPS and pace.evaluation_seconds:
            every = auto_interval(steps) if isinstance(interval, str) else interval
            n_between = 0 if every is None else steps // every
            if "train.eval_interval" not in self._given and isinstance(interval, str):
                affordable = EVALUATIONS_SHARE * budget.seconds / pace.evaluation_seconds
                if n_between > affordable:
                    self._settings["train.eval_interval"] = steps
                    n_between = 0
            steps = math.floor((left - n_between * pace.evaluation_seconds) / pace.step_seconds)
        if steps < FEWEST_STEPS:
            least = budget.used + closing + FEWEST_STEPS * pace.step_seconds
            least += pace.first_seconds
            raise ConfigError(
                f"--time {duration(budget.asked)} is too short: {duration(max(0.0, left))} of it "
                f"are left for steps of {pace.step_seconds:.2g} s, and fewer than {FEWEST_STEPS} "
                f"teach nothing; ask for {duration(budget.before + 1.5 * least)} or more"
            )
        if "train.eval_interval" in self._settings:
            self._settings["train.eval_interval"] = steps
        if "train.sample_interval" not in self._given and config.train.sample_interval == "auto":
            self._settings["train.sample_interval"] = steps
        if "train.compile" not in self._given and config.train.compile == "auto":
            self._settings["train.compile"] = pace.compiled
        self._settings |= self._length(config, steps)
        if config.schedule.name == "wsd":  # a longer time goes on from there
            self._settings |= self._obeying({"checkpoint.keep_before_cooldown": True})
        config = self._load(self._settings)
        plan = make_plan(config, dataset.vocab_size)
        length = (
            f"length  {plan.steps:,} steps, each of which reads {plan.tokens_per_step:,} tokens in "
            f"{pace.step_seconds:.2g} s: so fast is this machine "
            f"({flops_in_words(pace.flops_per_second)}, measured), and {duration(budget.left)} of "
            f"{duration(budget.asked)} are left"
        )
        return Choice(self._settings, config, (*reasons, length))


class _TuningChooser(_LengthChooser):
    """Chooses the learning rate and its warm-up for a run that begins with a model's weights,
    besides the number of steps."""

    def choose(self) -> Choice:
        """Choose a rate that is not above the configuration's, and return the Choice with it. With
        adapters, which begin anew, the rate stays. Raises ConfigError if too few steps fit."""
        config = self._load(self._without_length())
        rate = min(config.optimizer.learning_rate, tuning_rate(config.model.d_model))
        if config.lora.rank is None and "optimizer.learning_rate" not in self._given:
            lowest = min(config.schedule.min_learning_rate, rate / 10)
            self._settings |= self._obeying(
                {"optimizer.learning_rate": rate, "schedule.min_learning_rate": lowest}
            )
            self._reason = (
                f"rate    {rate:g} at most: {TUNING_SHARE:g} of what random weights of width "
                f"{config.model.d_model} bear, so that the model forgets little "
                "(optimizer.learning_rate)",
            )
        return super().choose()

    def _length(self, config: Config, steps: int) -> dict[str, Any]:
        found = super()._length(config, steps)
        if self._reason:
            found |= self._obeying({"schedule.warmup_steps": max(1, steps // 10)})
        return found


class _MoreSteps(_LengthChooser):
    """Chooses how many steps more fit into the time, for a run that goes on from step `begun` with
    another cool-down; `settings` are those chosen before."""

    def __init__(
        self,
        load: Load,
        given: Collection[str],
        budget: TimeBudget,
        progress: Progress,
        settings: Mapping[str, Any],
        begun: int,
    ) -> None:
        super().__init__(load, given, budget, progress)
        self._settings |= settings
        self._begun = begun

    def _length(self, config: Config, steps: int) -> dict[str, Any]:
        """Return the settings for `steps` steps more, of which the cool-down takes the same
        fraction of the whole run as before, or all."""
        schedule, whole = config.schedule, self._begun + steps
        before = self._load(self._settings)
        assert before.train.steps is not None
        assert before.schedule.cooldown_steps is not None
        share = before.schedule.cooldown_steps / before.train.steps
        found = {
            "train.steps": whole,
            "schedule.warmup_steps": schedule.warmup_steps,
            "schedule.cooldown_steps": max(1, min(steps, round(share * whole))),
        }
        at_the_end = ("train.eval_interval", "train.sample_interval")
        found |= {path: whole for path in at_the_end if path in self._settings}
        return self._obeying(found)


def choose_to_go_on(
    load: Load,
    given: Collection[str],
    budget: TimeBudget,
    settings: Mapping[str, Any],
    begun: int,
    progress: Progress,
) -> Choice:
    """Choose the length of a run that goes on from step `begun`, before its cool-down, so that its
    further steps end within the budget. `settings` are those chosen for the run so far; the other
    arguments are those of `choose_for_time`, with its errors."""
    return _MoreSteps(load, given, budget, progress, settings, begun).choose()


class _SizeChooser(_LengthChooser):
    """Chooses vocabulary, model size, batch and learning rate for the time, besides the number of
    steps."""

    def choose(self) -> Choice:
        """Choose the best model size for the expected speed, and time some steps with it. If the
        measured speed suggests another size, and a second trial is short enough
        (SECOND_TRIAL_SHARE), choose and time that size. Return the Choice. Raises ConfigError if
        too few steps fit."""
        self._settings |= self._obeying(flat_overrides(packaged_table("train/timed/recipe.toml")))
        asked = self._load(self._settings)
        fraction = _fraction_of_cores()
        prepared = find_header(asked.data.path) is not None
        n_bytes = 0 if prepared or asked.data.sources else corpus_of(asked.data).n_bytes
        flops = _expected_flops(asked) * fraction * self._seconds_left
        if "data.tokenizer" not in self._given and n_bytes:
            self._settings["data.tokenizer"] = self._vocabulary(asked, n_bytes, flops)
        dataset = self._open(self._load(self._settings))
        n_unique = dataset.split("train").n_tokens
        speed = _expected_flops(asked) * fraction
        chosen, pace = None, None
        for trial in range(2):
            flops = speed * self._seconds_left
            found = self._best_size(asked, dataset.vocab_size, flops, n_unique)
            if found == chosen:
                break
            if trial and pace is not None:
                again = pace.first_seconds + TRIAL_SHARE * self._budget.seconds
                if again > SECOND_TRIAL_SHARE * self._budget.seconds:
                    break
            chosen = found
            self._take(chosen, asked, dataset.vocab_size, flops, n_unique)
            config = self._load({**self._settings, **self._without_length()})
            plan = make_plan(config, dataset.vocab_size)
            per_step = plan.tokens_per_step * plan.least_flops_per_token
            pace = self._measure(
                self._with_steps(config, max(FEWEST_STEPS, math.floor(flops / per_step))), dataset
            )
            speed = pace.flops_per_second
        assert pace is not None
        return self._of_length(dataset, pace, self._reasons(dataset, n_bytes, speed))

    def _length(self, config: Config, steps: int) -> dict[str, Any]:
        found = super()._length(config, steps)
        if config.schedule.name == "wsd":
            found["schedule.cooldown_steps"] = max(1, round(COOL_DOWN_SHARE * steps))
        found["schedule.warmup_steps"] = max(1, round(WARM_UP_SHARE * steps))
        return self._obeying(found)

    @property
    def _seconds_left(self) -> float:
        """Seconds of the budget left, at least 1: a run with too few steps is refused later, once
        their time is measured."""
        return max(1.0, self._budget.left)

    def _vocabulary(self, asked: Config, n_bytes: int, flops: float) -> str:
        def tokens_of_run(vocab_size: int) -> float:
            chosen = self._best_size(asked, vocab_size, flops, n_bytes // 3)
            return flops / self._flops_per_token(asked, chosen, vocab_size)

        return best_vocabulary(n_bytes, tokens_of_run)

    def _best_size(self, asked: Config, vocab_size: int, flops: float, n_unique: int) -> Size:
        d_model = asked.model.d_model if "model.d_model" in self._given else None
        n_layers = asked.model.n_layers if "model.n_layers" in self._given else None
        return best_size(
            sizes_within(SIZES, d_model, n_layers),
            lambda each: self._flops_per_token(asked, each, vocab_size),
            flops,
            n_unique,
        )

    def _flops_per_token(self, asked: Config, chosen: Size, vocab_size: int) -> float:
        has_gate = asked.model.feed_forward.has_gate
        settings = {**self._settings, **self._obeying(_model_settings(chosen, has_gate=has_gate))}
        return make_plan(self._load(settings), vocab_size).least_flops_per_token

    def _take(
        self, chosen: Size, asked: Config, vocab_size: int, flops: float, n_unique: int
    ) -> None:
        """Add to the chosen settings those that follow from a model size: model, batch, dropout,
        weight decay and learning rate, except what the user set.

        chosen: the model size.
        asked: the configuration with what the user set.
        vocab_size: entries of the vocabulary.
        flops: FLOPs that the run has time for.
        n_unique: tokens in the training split.
        """
        n_tokens = flops / self._flops_per_token(asked, chosen, vocab_size)
        passes = n_tokens / n_unique
        settings = _model_settings(chosen, has_gate=asked.model.feed_forward.has_gate)
        context = asked.model.context_length
        if "model.context_length" not in self._given:
            context = chosen.context_length
        if "train.tokens_per_step" not in self._given:
            settings["train.batch_size"] = max(1, step_tokens(n_tokens) // context)
        settings["model.dropout"] = OVERFITTING_DROPOUT if passes > OVERFITTING_PASSES else 0.0
        settings["optimizer.weight_decay"] = round(min(1.0, max(0.1, DECAY_PER_PASS * passes)), 2)
        settings["optimizer.learning_rate"] = best_rate(chosen.d_model)
        self._settings |= self._obeying(settings)

    def _reasons(self, dataset: Dataset, n_bytes: int, speed: float) -> tuple[str, ...]:
        """Return two lines to print: the reasons for the vocabulary and for the model size.
        `n_bytes` is the text's size, 0 if already tokenized; `speed` is in FLOPs per second."""
        config = self._load({**self._settings, **self._without_length()})
        plan = make_plan(config, dataset.vocab_size)
        model, train = config.model, dataset.split("train")
        n_tokens = speed * self._seconds_left / plan.least_flops_per_token
        text = f"{size(n_bytes)}, cut into " if n_bytes else ""
        n_passes = n_tokens / train.n_tokens
        return (
            f"text    {text}{count(train.n_tokens)} tokens (pieces of text) of "
            f"{dataset.vocab_size:,} kinds; the model has time to read all of it "
            f"{n_passes:.2g} times (data.tokenizer={config.data.tokenizer})",
            f"model   {count(plan.n_parameters)} parameters in {model.n_layers} layers of width "
            f"{model.d_model}, which sees {model.context_length} tokens at once: a larger one "
            "would read too little in this time, a smaller one learns less "
            f"(optimizer.learning_rate={config.optimizer.learning_rate:g}, "
            f"weight_decay={config.optimizer.weight_decay:g})",
        )


OVERFITTING_PASSES, OVERFITTING_DROPOUT = 5.0, 0.1
DECAY_PER_PASS = 0.11
"""Weight decay per pass over the text. From docs/results.md: nine passes want dropout of 0.1 and
ten times the weight decay for one pass."""


def _model_settings(chosen: Size, *, has_gate: bool) -> dict[str, Any]:
    """Return a model size's settings (dotted path → value); `has_gate` says whether its
    feed-forward layers have a gate."""
    width = {"model.feed_forward.width": gated_width(chosen.d_model)} if has_gate else {}
    return {
        **width,
        "model.d_model": chosen.d_model,
        "model.n_layers": chosen.n_layers,
        "model.attention.n_heads": _heads(chosen.d_model),
        "model.context_length": chosen.context_length,
    }


def _heads(d_model: int) -> int:
    """Return a number of heads that divides `d_model` into heads of 32 channels (64 if d_model >
    256), or into the next larger even head size."""
    wanted = d_model // (32 if d_model <= 256 else 64)
    return next((n for n in range(max(1, wanted), 0, -1) if d_model % (2 * n) == 0), 1)


def _fraction_of_cores() -> float:
    """Return the fraction of this process's cores that other programs leave it, by the load
    average; 1 if unknown. A container's load average is its machine's, and so are these cores."""
    n_cores = len(usable_cores())
    try:
        return min(1.0, n_cores / max(1.0, os.getloadavg()[0]))
    except OSError:
        return 1.0


def _expected_flops(config: Config) -> float:
    """Return the FLOPs per second to expect in training on this machine, if nothing else runs on
    it: the matmul peak, published or measured, × CPU_SHARE or GPU_SHARE."""
    capabilities = machine_capabilities()
    device = choose_device(config.train.device, capabilities)
    precision, _ = choose_precision(config.train.precision, device, capabilities)
    name = device_name(device, capabilities)
    peak = (
        peak_flops(name, precision) or ceiling(name, device, arithmetic(precision).products).flops
    )
    return peak * (CPU_SHARE if device.type == "cpu" else GPU_SHARE)
