"""The pace of each rank: how long it computes in a step, and how long the others wait for the
slowest one.

All ranks' steps take equally long, since they wait for each other. So what counts is a rank's own
time: in which it computes, or could if another program did not have its core, or reads its batch
(`OwnTime`). At logged steps the ranks send it in the message by which they compare stop signals.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pentameter.estimating.bytes.costs import pass_seconds
from pentameter.estimating.bytes.plan_estimates import step_of
from pentameter.planning.plan import Plan
from pentameter.processes.group.world import World
from pentameter.record.events import RankMetrics

SLOW = 1.2
"""A rank counts as slow if its own time ÷ the others' is at least this."""
SLOW_FOR_PLAN = 2.0
"""The limit for a rank that alone runs its stage: it is slow if its own time ÷ what the plan
expects of the stage is at least this."""
SLOW_STEPS = 50
"""Steps in a row for which a rank is slow before a warning says so. After a warning, no rank may be
slow for as many before another one."""


@dataclass(frozen=True)
class OwnTime:
    """Mean times of one rank over its latest `n_steps` steps, in seconds: `own_seconds` without its
    waits for other ranks, and `step_seconds` for a whole step."""

    own_seconds: float
    step_seconds: float
    n_steps: int


class RankPace:
    """Compares how long the ranks of a run work per step. With a pipeline, a rank is compared with
    the other ranks of its stage. If it has the stage alone, it is compared with all other ranks,
    relative to the time that the matmuls of each stage should take by `plan`. Creating one is
    collective."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._world = world
        self._hosts = world.all_gather(socket.gethostname())
        layout = plan.layout
        self._stages = [layout.coordinates(rank)["pipeline"] for rank in range(world.size)]
        costs = [1.0] * layout.n_stages
        if layout.pipeline > 1 and plan.built_by is None:
            costs = [sum(each) for each in pass_seconds(step_of(plan))]
        self._costs = [
            sum(costs[stage] for stage in layout.stages_of(coordinate))
            for coordinate in self._stages
        ]

    def numbers(self, own: OwnTime) -> list[int]:
        """Return one number for each rank, to be all-reduced to their maxima, after which every
        rank knows all times: this rank's own time in nanoseconds at its index, 0 elsewhere."""
        numbers = [0] * self._world.size
        numbers[self._world.rank] = max(1, round(1e9 * own.own_seconds))
        return numbers

    def metrics(self, step: int, maxima: Sequence[int], own: OwnTime) -> RankMetrics:
        """Return the metrics of the slowest rank at `step`. `maxima` are the times of all ranks in
        nanoseconds, as all-reduced from `numbers`; `own` has this rank's times, of which the time
        of a whole step is the same on every rank."""
        relative = [
            nanoseconds / 1e9 / cost for nanoseconds, cost in zip(maxima, self._costs, strict=True)
        ]
        expected = [self._of_others(rank, relative) for rank in range(self._world.size)]
        ratios = [mine / others for mine, others in zip(relative, expected, strict=True)]
        slowest = ratios.index(max(ratios))
        own_seconds = maxima[slowest] / 1e9
        others_seconds = expected[slowest] * self._costs[slowest]
        waited = (own_seconds - others_seconds) / own.step_seconds
        return RankMetrics(
            step,
            own.n_steps,
            slowest,
            self._hosts[slowest],
            own_seconds,
            others_seconds,
            min(1.0, max(0.0, waited)),
            self._stages.count(self._stages[slowest]) > 1,
        )

    def _of_others(self, rank: int, relative: Sequence[float]) -> float:
        """Return the median of `relative` (one value for each rank) over the other ranks; over
        those of the same pipeline stage if there are any."""
        others = [other for other in range(len(relative)) if other != rank]
        alike = [other for other in others if self._stages[other] == self._stages[rank]]
        return median(relative[other] for other in alike or others)


class SlowRank:
    """Finds a rank that has been slow for SLOW_STEPS steps in a row."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._slow_steps = self._well_steps = 0
        self._has_warned = False

    def warning(self, metrics: RankMetrics) -> str | None:
        """Return a sentence if the slowest rank has been slow for SLOW_STEPS steps, else None. It
        is returned once, and again only after as many steps in which no rank was slow."""
        slow = SLOW if metrics.alike else SLOW_FOR_PLAN
        if metrics.own_seconds < slow * metrics.others_seconds:
            self._rank, self._slow_steps = None, 0
            self._well_steps += metrics.n_steps
            self._has_warned &= self._well_steps < SLOW_STEPS
            return None
        if metrics.slowest != self._rank:
            self._rank, self._slow_steps = metrics.slowest, 0
        self._well_steps = 0
        self._slow_steps += metrics.n_steps
        if self._has_warned or self._slow_steps < SLOW_STEPS:
            return None
        self._has_warned = True
        more = metrics.own_seconds / metrics.others_seconds - 1
        return (
            f"rank {metrics.slowest} on {metrics.host} has taken {metrics.own_seconds:.3g} s of a "
            f"step for itself, {more:.0%} more than the {metrics.others_seconds:.3g} s of the "
            f"others, for {self._slow_steps} steps: they wait for it {metrics.waited:.0%} of the "
            "time. Look there for another program, a hot processor or a slow disk"
        )
