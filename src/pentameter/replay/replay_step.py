"""Replay of a step of a run, up to the conclusion: all of `pentameter replay` except its command
line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pentameter.checkpoint.folders.opening import Check, Checkpoint
from pentameter.checkpoint.folders.verification import Verification
from pentameter.errors import CorruptError, printable
from pentameter.planning.layouts.layout import make_layout
from pentameter.planning.plan import Plan, make_plan
from pentameter.processes.group.world import World
from pentameter.record.events import strict
from pentameter.record.run_data import open_run_data
from pentameter.replay.conclusion import Conclusion, conclude, differing_facts
from pentameter.replay.record import Route, RunRecord, read_record, schedules_of
from pentameter.replay.steps import Replay, Replayed
from pentameter.train.compute import choose_compute
from pentameter.train.faults.device_memory import check_device_memory, fit_micro_batches
from pentameter.train.faults.row_losses import HighestRows
from pentameter.train.user_components import UserComponents


@dataclass(frozen=True)
class StepReplay:
    """A replayed step: the `route` and the `layout` in which it was computed, and the
    conclusion."""

    record: RunRecord
    step: int
    route: Route
    layout: str
    differences: tuple[str, ...]
    """"name: then → now" for each fact about the environment that differs from the run's."""
    rows: HighestRows
    """The batch rows with the highest loss, computed with the weights before the step."""
    conclusion: Conclusion

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of `replay --json`; NaN becomes null."""
        found, weights = self.conclusion, self.conclusion.replayed.weights
        return {
            "step": self.step,
            "from_step": self.route.base,
            "steps": list(self.route.steps),
            "layout": self.layout,
            "agrees": found.agrees,
            "equal": found.equal,
            "verdict": found.verdict,
            "reason": found.reason,
            "numbers": [
                strict({**asdict(each), "is_equal": each.is_equal}) for each in found.numbers
            ],
            "weights": None if weights is None else strict(asdict(weights)),
            "skipped": self.record.skips.get(self.step),
            "undone_by": self.record.undone_by(self.step),
            "differences": list(self.differences),
            "rows": [
                {"row": row.row, "loss": loss, "told": told}
                for (row, loss), told in zip(self.rows.rows, self.rows.told, strict=True)
            ],
        }

    def lines(self) -> list[str]:
        """Return the result as lines for people."""
        conclusion, record, step = self.conclusion, self.record, self.step
        begun = "the initial weights" if self.route.base == 0 else f"checkpoint {self.route.base}"
        lines = [
            f"{record.config.name}, step {step:,} computed again from {begun} on {self.layout}"
            f" ({len(self.route.steps)} steps)"
        ]
        if (reason := record.skips.get(step)) is not None:
            made = conclusion.replayed.numbers[step].made
            does = "makes it" if made else "leaves it out, too"
            lines.append(f"  the run left its update out ({reason}); the replay {does}")
        if (last := record.undone_by(step)) is not None:
            lines.append(f"  its update was undone by the rollback after step {last:,}")
        if self.route.steps[-1] != step:
            lines.append(
                f"  nothing is recorded of it: compared with step {self.route.steps[-1]:,}, the "
                "next that is"
            )
        shown = {step, self.route.steps[-1], conclusion.first_different}
        lines += [f"  {each}" for each in conclusion.numbers if each.step in shown]
        if (weights := conclusion.replayed.weights) is not None:
            lines.append(f"  step {weights.step:,} weights and optimizer state: {weights}")
        lines += [f"  differs here: {each}" for each in self.differences]
        lines.append(f"{conclusion.verdict}: {conclusion.reason}")
        lines.append(f"rows of the highest loss (median {self.rows.median:.4g}):")
        lines += [f"  {each}" for each in self.rows.told]
        lines.append(f"{self.rows.command(record.folder, step)} shows the first of them")
        return [printable(line) for line in lines]


def replay_step(
    folder: Path, step: int, layout: str | None, world: World, say: Callable[[str], None]
) -> StepReplay:
    """Compute a step of the run in `folder` again, on the ranks of `world`, and compare it with
    what the run recorded. Nothing is written to the folder.

    step: number of the step, from 1. layout: the degrees of parallelism as text; None for the run's
    own. say: prints a line on rank 0.

    Collective. Raises ConfigError for a step that cannot be replayed, or a run with a model or an
    optimizer from the user's code; CorruptError if the data has changed or no intact checkpoint is
    left.
    """
    data = open_run_data(folder, verify=world.local_rank == 0)
    index = data.batch_index(step)
    verification = Verification(world)
    record, route, base, saved, passed_over = verification.on_main(
        lambda: _prepared(folder, step, verification.check), "verifying", step
    )
    for error in passed_over:
        say(f"passed over a checkpoint: {error}")
    data.batches.prepare(index + 1)
    config = record.config_on(step, layout)
    plan = make_plan(
        config,
        data.dataset.vocab_size,
        data.batches.rows_per_epoch,
        world_size=world.size,
        local_size=world.local_size,
    )
    made_with = base or verification.on_main(
        lambda: record.open_any_checkpoint(verification.check), "verifying", step
    )
    if made_with is not None:
        # Refuses a run with a model or an optimizer from the user's code.
        UserComponents().check_same(made_with, plan, with_schedule=True)
    compute = choose_compute(plan, world)
    plan = fit_micro_batches(plan, compute, world)
    check_device_memory(plan, compute, world.local_size)
    here = world.on_main(compute.environment)
    made_by = _one_of_each_start(record, route.steps)
    differing = (differing_facts(record.start_of(each), here) for each in made_by)
    differences = list(dict.fromkeys(chain.from_iterable(differing)))
    schedules = world.on_main(lambda: schedules_of(record, route.steps, plan.config.schedule))
    replay = Replay(record, data, plan, compute, world, base, schedules)
    begun = "the initial weights" if base is None else f"checkpoint step {base.step}"
    say(f"from {begun}, {len(route.steps)} steps on {plan.layout}")
    rows: list[HighestRows] = []

    def before_step(number: int) -> None:
        world.activity.note("training", number)
        if number == step:
            rows.append(replay.highest_rows(step))

    first = replay.run(route.steps, saved, before_step)

    def concluded(again: Replayed | None) -> Conclusion:
        return conclude(
            record,
            first,
            again,
            precision=compute.precision,
            differences=differences,
            is_own_layout=all(_is_own_layout(record, each, plan) for each in made_by),
        )

    conclusion = concluded(None)
    if conclusion.equal != "bits" and conclusion.verdict == "hardware":
        say("it differs: computing it once more")
        conclusion = concluded(replay.run(route.steps, saved))
    return StepReplay(
        record, step, route, str(plan.layout), tuple(differences), rows[0], conclusion
    )


def _prepared(
    folder: Path, step: int, check: Check
) -> tuple[RunRecord, Route, Checkpoint | None, Checkpoint | None, list[CorruptError]]:
    """Read and open what a replay of `step` needs. Return five values: the run's record; the route;
    the checkpoint to begin with, None for the initial weights; the checkpoint after the last step,
    None if there is none; and the errors of checkpoints that were skipped because `check` found
    them damaged."""
    record = read_record(folder)
    passed_over = []
    while True:
        route = record.route(step)
        last = route.steps[-1]
        begun = route.base if record.has_checkpoint(route.base) else None
        wanted = [begun, last if record.saves_result_of(last) else None]
        opened: list[Checkpoint | None] = []
        try:
            for number in wanted:
                opened.append(None)
                if number is not None:
                    opened[-1] = record.open_checkpoint(number, check)
        except CorruptError as error:
            passed_over.append(error)
            damaged = wanted[len(opened) - 1]
            assert damaged is not None  # it was opened
            record = record.without(damaged, error)
            continue
        base, saved = opened
        return record, route, base, saved, passed_over


def _one_of_each_start(record: RunRecord, steps: Sequence[int]) -> list[int]:
    """Return one of `steps` for each start of the run (the first one, or a resume) that made some
    of them. There are several starts among them if the checkpoint between them was removed."""
    return list({id(record.start_of(step)): step for step in steps}.values())


def _is_own_layout(record: RunRecord, step: int, plan: Plan) -> bool:
    """Return True if `plan` has the layout and the micro-batch size with which the run made
    `step`."""
    own = record.config_on(step, None)
    same = make_layout(own.parallel) == plan.layout
    return same and own.train.micro_batch_size in (None, plan.micro_batch_size)
