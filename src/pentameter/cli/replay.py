"""`pentameter replay`: compute a step of a run again, and compare."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pentameter.cli.options.arguments import parse
from pentameter.errors import TrainingFailedError, remark
from pentameter.processes.group.rank import find_rank, processes_together
from pentameter.processes.launch.local_launch import check_launch, run_local
from pentameter.processes.launch.program import Command, python_command
from pentameter.processes.launch.worker import watch_launcher

if TYPE_CHECKING:
    from pentameter.processes.group.world import World
    from pentameter.replay.replay_step import StepReplay


@dataclass(frozen=True)
class ReplayArguments:
    """Compute a step of a run again, from the checkpoint before it, and say whether loss, gradient
    norm and weights agree: to the bit in the run's layout on the same kind of machine, to rounding
    elsewhere.

    It concludes: batch (the step is reproducible, and the rows with the highest loss are named),
    hardware (what must be equal to the bit is not) or code (versions or machine differ). Ends with
    0 if all agrees, else with 70. The run folder is only read; the run may go on meanwhile.
    """

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """The run's folder, runs/NAME. Its tokens must still be there."""
    step: Annotated[int, tyro.conf.arg(metavar="N")]
    """The step, from 1, as metrics.jsonl, the log and the report number them."""
    layout: Annotated[str | None, tyro.conf.arg(metavar="LAYOUT")] = None
    """Another layout, data=2,tensor=2; as many processes of this machine are started. The one in
    which the run made the step when absent."""
    nproc: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """The number of processes, if --layout leaves `data` out."""
    oversubscribe: tyro.conf.FlagCreatePairsOff[bool] = False
    """Start more processes than the cores of this machine can serve."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""


def run(arguments: list[str]) -> int:
    """Replay the step that `arguments` (the command line after the verb) name, and return the exit
    code 0. Raises TrainingFailedError if it differs from what the run recorded."""
    watch_launcher()
    asked = parse(ReplayArguments, arguments, verb="replay")
    from pentameter.planning.layouts.layout import make_layout
    from pentameter.replay.record import read_record

    launched = find_rank()
    config = read_record(asked.run_dir).config_on(asked.step, asked.layout)
    layout = make_layout(config.parallel, processes_together(asked.nproc, launched))
    check_launch(
        config, layout.world_size, launched, oversubscribe=asked.oversubscribe, check_fit=True
    )
    if launched is None and layout.world_size > 1:
        run_local(Command(python_command("replay", *arguments)), layout.world_size)
        return 0
    from pentameter.processes.group.join import joined_world_of

    with joined_world_of(config, launched) as world:
        found = _replay(asked, world)
    if not found.conclusion.agrees:
        raise TrainingFailedError(
            f"step {asked.step} of {asked.run_dir} is not what its replay gave: "
            f"{found.conclusion.verdict}: {found.conclusion.reason}"
        )
    return 0


def _replay(asked: ReplayArguments, world: World) -> StepReplay:
    """Replay the step, and print the result on rank 0. Collective."""
    from pentameter.replay.replay_step import replay_step

    def say(text: str) -> None:
        if world.is_main:
            remark(text)

    found = replay_step(asked.run_dir, asked.step, asked.layout, world, say)
    if world.is_main:
        print(json.dumps(found.to_json()) if asked.json else "\n".join(found.lines()), flush=True)
    return found
