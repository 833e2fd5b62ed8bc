"""`pentameter verify`: verify that a configuration trains the same on every layout."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pentameter.cli.options.arguments import parse_arguments, print_tables, sizes_of_data
from pentameter.errors import ConfigError, TrainingFailedError, printable

if TYPE_CHECKING:
    from pentameter.config.schema import Config
    from pentameter.verify.compare import Outcome
    from pentameter.verify.data import DataOutcome


BEST_OF = "best:"
WIDTH = 140
"""Line width without a terminal, in characters."""


@dataclass(frozen=True)
class VerifyArguments:
    """Verify that layouts train like one process: loss, gradients and weights after some steps.

    The configuration is made small but keeps its structure, and runs in float64 in processes on
    this machine's CPU. Ends with 0 if all layouts agree, else with 70. Every key of the
    configuration can be overridden: --model.tied-head false.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET-or-FILE")]
    """A preset (quickstart, gpt2-124m, …) or a TOML file."""
    layouts: Annotated[str, tyro.conf.arg(metavar="all|best:CLUSTER|LAYOUT;LAYOUT…")] = "all"
    """Layouts with ; between them, like 'data=2,zero=3;tensor=2,pipeline=2'. A layout may also set
    micro_batches, activation_checkpoint, compile, tied_head, attention_dropout, idle_experts and
    kv_heads. best:h100-80gb:8x1 are those that plan --search finds the fastest there, of the
    configuration as it is."""
    steps: int = 3
    """Optimizer steps to compare."""
    data: tyro.conf.FlagCreatePairsOff[bool] = False
    """Verify instead that layouts read the same batches, from the configuration's own data."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""


def run(arguments: list[str]) -> int:
    """Verify the layouts that `arguments` (the command line after the verb) name. Return the exit
    code: 0 if every layout agrees with one process, else 70."""
    parsed, overrides = parse_arguments(VerifyArguments, arguments, verb="verify")
    from pentameter.config.files.command_source import configuration_of
    from pentameter.config.files.load import load_config
    from pentameter.processes.group.rank import find_rank

    launched = find_rank()
    if launched is not None:
        raise ConfigError(
            f"verify starts its own processes, and {launched.source} has started "
            f"{launched.world_size} of it; start it once, alone"
        )
    if not 1 <= parsed.steps <= 100:
        raise ConfigError(f"--steps {parsed.steps} must be in 1 … 100")
    config = load_config(*configuration_of(parsed.source, overrides))
    if parsed.layouts.startswith(BEST_OF):
        from pentameter.verify.cases import fastest_cases

        sizes = sizes_of_data(config)
        cases = fastest_cases(config, parsed.layouts.removeprefix(BEST_OF), sizes)
        parsed = replace(parsed, layouts=";".join(map(str, cases)))
    again = ["pentameter", "verify", parsed.source, *overrides, "--steps", str(parsed.steps)]
    passed = _data(config, parsed) if parsed.data else _layouts(config, parsed, again)
    return 0 if passed else TrainingFailedError.exit_code


def _layouts(config: Config, parsed: VerifyArguments, again: Sequence[str]) -> bool:
    """Train all layouts and print the comparison with one process; return True if all agree. again:
    the command line to print for a layout that fails."""
    from pentameter.verify.compare import TOLERANCE, verify_layouts
    from pentameter.verify.shrink import described_changes, shrunk_cases
    from pentameter.verify.text import layout_table, summary, with_progress
    from pentameter.verify.workers import Workers

    small, cases = shrunk_cases(config, parsed.layouts)
    changes = list(described_changes(config, small))
    if not parsed.json:
        _say(f"{config.name}, in float64 on CPU processes, made small: {', '.join(changes)}\n")
    with Workers() as workers:
        found = verify_layouts(small, cases, workers, n_steps=parsed.steps)
        outcomes = list(with_progress(found, [case.name for case in cases]))
    passed = all(outcome.passed for outcome in outcomes)
    if parsed.json:
        shrunk = {"tolerance": TOLERANCE, "steps": parsed.steps, "shrunk": changes}
        print(_json(passed, outcomes, **shrunk))
        return passed
    print_tables([layout_table(outcomes), ""], WIDTH)
    for outcome in outcomes:
        if not outcome.passed:
            command = shlex.join([*again, "--layouts", str(outcome.case)])
            _say(f"✗ {outcome.case.name}: {outcome.problem}\n  alone: {command}")
    first = next((o.worker_traceback for o in outcomes if o.worker_traceback), "")
    # Of the first crash: the others' are mostly the same.
    print(printable(first, keep="\n\t"), end="", file=sys.stderr)
    said = f"every loss, gradient and weight of {parsed.steps} steps within {TOLERANCE:.0e}"
    _say(summary(outcomes, said))
    return passed


def _data(config: Config, parsed: VerifyArguments) -> bool:
    """Compare the batches that each layout reads with those of one process, and print the result.
    Return True if all agree."""
    from pentameter.verify.data import verify_data_of
    from pentameter.verify.text import data_table, summary

    found = verify_data_of(config, parsed.layouts, parsed.steps)
    if parsed.json:
        print(_json(found.passed, found.outcomes, **found.facts()))
        return found.passed
    print_tables([data_table(found.outcomes), ""], WIDTH)
    epoch = ""
    if found.rows_per_epoch is not None:
        epoch = f", {found.rows_per_epoch:,} rows an epoch"
    _say(
        summary(
            found.asked,
            f"the {found.batch_size} rows of steps {', '.join(map(str, found.steps))}, in "
            f"{found.order} order{epoch}",
        )
    )
    if all(outcome.refused for outcome in found.asked):
        raise ConfigError(f"--layouts {parsed.layouts!r}: no run can have any of them, see above")
    return found.passed


def _json(passed: bool, outcomes: Sequence[Outcome | DataOutcome], **facts: Any) -> str:
    layouts = [outcome.to_json() for outcome in outcomes]
    return json.dumps({"passed": passed, **facts, "layouts": layouts}, allow_nan=False)


def _say(text: str) -> None:
    print(printable(text, keep="\n"), flush=True)
