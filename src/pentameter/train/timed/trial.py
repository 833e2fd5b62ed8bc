"""A trial before a run: some real steps of its configuration on this machine, timed and
discarded."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from pentameter.config.schema import Config
from pentameter.data.batches.step import suited_to, training_batches
from pentameter.data.shards.dataset import Dataset
from pentameter.evaluate.split import evaluation_batch_size, evaluation_batches
from pentameter.parallel.engine import Engine
from pentameter.planning.plan import Plan, make_plan
from pentameter.processes.group.join import lone_world
from pentameter.train.compute import choose_compute
from pentameter.train.evaluations import VALIDATION
from pentameter.train.faults.device_memory import check_device_memory, fit_micro_batches
from pentameter.train.start import build_engine
from pentameter.train.update import update_weights
from pentameter.train.user_components import UserComponents

FEWEST_STEPS, MOST_STEPS = 4, 50
"""Least and largest number of steps of a trial after the first, which compiles."""
EVALUATION_BATCHES = 2


@dataclass(frozen=True)
class Pace:
    """Measured times for a configuration on this machine: `step_seconds` is a median,
    `flops_per_second` the model's FLOPs in such a step ÷ its seconds; `compiled` says whether the
    step was compiled."""

    step_seconds: float
    evaluation_seconds: float
    """Seconds of a pass over the held-out text; 0 if nothing is held out."""
    first_seconds: float
    """Extra seconds of the first step and evaluation over later ones, as they compile."""
    flops_per_second: float
    compiled: bool


def measure_pace(config: Config, dataset: Dataset, seconds: float) -> Pace:
    """Train `config` for about `seconds` after the first step (at least FEWEST_STEPS, at most
    MOST_STEPS steps), time an evaluation, discard the result, and return the measured times.

    Raises ConfigError if the configuration is invalid or exceeds this machine's memory.
    """
    config = suited_to(dataset.split("train"), config)
    batches = training_batches(config, dataset.split("train"))
    plan = make_plan(config, dataset.vocab_size, batches.rows_per_epoch)
    compute = choose_compute(plan)
    plan = fit_micro_batches(plan, compute, lone_world())
    check_device_memory(plan, compute, 1)
    engine, optimizer = build_engine(plan, compute, lone_world(), UserComponents())
    rate, clip_norm = plan.config.optimizer.learning_rate, plan.config.optimizer.clip_norm

    def step(number: int) -> None:
        batch = batches.batch(number, engine.rows)
        loss = engine.forward_backward(batch, number)
        # A millionth of the rate: nothing is learned here, so nothing can diverge.
        update_weights(engine, optimizer, loss, rate * 1e-6, 1.0, clip_norm)

    first, later = _seconds_of(step, seconds)
    evaluation, first_evaluation = _evaluation_seconds(engine, plan, dataset)
    flops = plan.tokens_per_step * plan.least_flops_per_token
    return Pace(
        step_seconds=later,
        evaluation_seconds=evaluation,
        first_seconds=max(0.0, first - later) + first_evaluation,
        flops_per_second=flops / later,
        compiled=compute.compiled,
    )


def _seconds_of(act: Callable[[int], None], seconds: float) -> tuple[float, float]:
    """Time the function `act`: call it with 0, 1, 2, … for about `seconds` after the first call, at
    least FEWEST_STEPS and at most MOST_STEPS more times. Return (seconds of the first call, median
    seconds of the later ones)."""
    times: list[float] = []
    deadline = math.inf
    for number in itertools.count():
        start = time.perf_counter()
        act(number)
        now = time.perf_counter()
        times.append(now - start)
        if number == 0:
            deadline = now + seconds
        elif number >= MOST_STEPS or (number >= FEWEST_STEPS and now >= deadline):
            return times[0], median(times[1:])
    raise AssertionError  # unreachable


def _evaluation_seconds(engine: Engine, plan: Plan, dataset: Dataset) -> tuple[float, float]:
    """Return the seconds of a pass over the held-out text, extrapolated from EVALUATION_BATCHES
    batches, and the extra seconds of the first batch; zeros if nothing is held out or evaluation is
    off."""
    split = dataset.split(VALIDATION)
    if plan.config.train.eval_interval is None or split.n_tokens < 2:
        return 0.0, 0.0
    context = plan.config.model.context_length
    size = evaluation_batch_size(plan, context)
    n_batches = math.ceil(split.n_tokens / (size * context))
    times = []
    for batch in itertools.islice(
        evaluation_batches(split, context_length=context, batch_size=size), EVALUATION_BATCHES
    ):
        start = time.perf_counter()
        engine.evaluate(batch)
        times.append(time.perf_counter() - start)
    return n_batches * min(times), max(0.0, times[0] - min(times))
