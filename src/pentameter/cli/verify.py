"""`pentameter verify`: proves that a configuration trains the same on every layout."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pentameter.cli.arguments import parse_arguments
from pentameter.errors import ConfigError, TrainingFailedError, printable

if TYPE_CHECKING:
    from rich.table import Table

    from pentameter.config.schema import Config
    from pentameter.verify.compare import Outcome
    from pentameter.verify.data import DataOutcome


BEST_OF = "best:"
WIDTH = 140
"""Characters of a line where the output is no terminal."""


@dataclass(frozen=True)
class VerifyArguments:
    """Prove that layouts train as one process does: loss, gradients and weights of some steps.

    The configuration is made small but keeps its structure, and runs in float64 in processes of
    this machine's CPU. Ends with 0 where all layouts agree, with 70 where one does not.
    Every key of the configuration can be overridden: --model.tied-head false.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET-or-FILE")]
    """A preset (quickstart, gpt2-124m, …) or a TOML file."""
    layouts: Annotated[str, tyro.conf.arg(metavar="all|best:CLUSTER|LAYOUT;LAYOUT…")] = "all"
    """Layouts with ; between them, like 'data=2,zero=3;tensor=2,pipeline=2'. A layout may also set
    micro_batches, activation_checkpoint and tied_head. best:h100-80gb:8x1 are those that plan
    --search finds the fastest there, of the configuration as it is."""
    steps: int = 3
    """Optimizer steps to compare."""
    data: tyro.conf.FlagCreatePairsOff[bool] = False
    """Instead: prove that layouts read the same batches, of the configuration's own data."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""


def run(arguments: list[str]) -> int:
    """Verify; 0 when every layout agrees with one process, else 70."""
    parsed, overrides = parse_arguments(VerifyArguments, arguments, verb="verify")
    from pentameter.cli.train import configuration_of
    from pentameter.config.load import load_config
    from pentameter.processes.place import find_place

    place = find_place()
    if place is not None:
        raise ConfigError(
            f"verify starts its own processes, and {place.source} has started {place.world_size} "
            "of it; start it once, alone"
        )
    if not 1 <= parsed.steps <= 100:
        raise ConfigError(f"--steps {parsed.steps} must be in 1 … 100")
    config = load_config(*configuration_of(parsed.source, overrides))
    if parsed.layouts.startswith(BEST_OF):
        cluster = parsed.layouts.removeprefix(BEST_OF)
        parsed = replace(parsed, layouts=_fastest_layouts(config, cluster))
    again = ["pentameter", "verify", parsed.source, *overrides, "--steps", str(parsed.steps)]
    passed = _data(config, parsed) if parsed.data else _layouts(config, parsed, again)
    return 0 if passed else TrainingFailedError.exit_code


def _fastest_layouts(config: Config, cluster: str) -> str:
    """The layouts that a search finds the fastest on a cluster, as `--layouts` takes them."""
    from pentameter.cli.train import vocabulary_and_epoch
    from pentameter.planning.cluster import parse_cluster
    from pentameter.planning.search import search
    from pentameter.verify.cases import Case

    found = search(config, parse_cluster(cluster), *vocabulary_and_epoch(config)[:2])
    if not found.estimates:
        raise ConfigError(
            f"--layouts {BEST_OF}{cluster}: no layout of {config.name} fits there; name a larger "
            "cluster, see pentameter plan"
        )
    plans = (estimate.plan for estimate in found.estimates)
    return ";".join(
        str(Case(plan.layout, activation_checkpoint=plan.config.train.activation_checkpoint))
        for plan in plans
    )


def _layouts(config: Config, parsed: VerifyArguments, again: Sequence[str]) -> bool:
    """Whether all layouts compute what one process does; says so. `again` is the command."""
    from pentameter.planning.plan import make_plan
    from pentameter.verify.cases import chosen_cases
    from pentameter.verify.compare import TOLERANCE, verify_layouts
    from pentameter.verify.shrink import case_config, described_changes, shrink
    from pentameter.verify.workers import Workers

    cases = chosen_cases(config, parsed.layouts)
    small = shrink(config, cases)
    for case in cases:
        try:
            make_plan(case_config(small, case))
        except ConfigError as error:  # no run could have it
            raise ConfigError(f"layout {str(case)!r}: {error}") from None
    changes = list(described_changes(config, small))
    if not parsed.json:
        _say(f"{config.name}, in float64 on CPU processes, made small: {', '.join(changes)}\n")
    with Workers() as workers:
        found = verify_layouts(small, cases, workers, n_steps=parsed.steps)
        outcomes = list(_with_progress(found, [case.name for case in cases]))
    passed = all(outcome.passed for outcome in outcomes)
    if parsed.json:
        shrunk = {"tolerance": TOLERANCE, "steps": parsed.steps, "shrunk": changes}
        print(_json(passed, outcomes, **shrunk))
        return passed
    _print(_layout_table(outcomes))
    for outcome in outcomes:
        if not outcome.passed:
            command = shlex.join([*again, "--layouts", str(outcome.case)])
            _say(f"✗ {outcome.case.name}: {outcome.problem}\n  alone: {command}")
    first = next((o.worker_traceback for o in outcomes if o.worker_traceback), "")
    # Of the first crash: the others' are mostly the same.
    print(printable(first, keep="\n\t"), end="", file=sys.stderr)
    said = f"every loss, gradient and weight of {parsed.steps} steps within {TOLERANCE:.0e}"
    _say(_summary(outcomes, said))
    return passed


def _data(config: Config, parsed: VerifyArguments) -> bool:
    """Whether all layouts read what one process does; says so."""
    from pentameter.data.batches.step import suited_to, training_batches
    from pentameter.data.open_dataset import open_dataset
    from pentameter.planning.batch_sizes import global_batch_size
    from pentameter.verify.cases import chosen_cases
    from pentameter.verify.data import chosen_steps, verify_data

    layouts = list(dict.fromkeys(case.layout for case in chosen_cases(config, parsed.layouts)))
    dataset = open_dataset(config.data)
    config = suited_to(dataset.split("train"), config)
    batches = training_batches(config, dataset.split("train"))
    batch_size = global_batch_size(config)
    steps = chosen_steps(batches, batch_size, parsed.steps)
    outcomes = list(verify_data(batches, batch_size, layouts, steps))
    passed = all(outcome.passed is not False for outcome in outcomes)
    if parsed.json:
        facts = {
            "dataset": dataset.hash,
            "order": config.data.order,
            "batch_size": batch_size,
            "rows_per_epoch": batches.rows_per_epoch,
            "steps": steps,
        }
        print(_json(passed, outcomes, **facts))
        return passed
    _print(_data_table(outcomes))
    said = (
        f"the {batch_size} rows of steps {', '.join(map(str, steps))}, in {config.data.order} "
        f"order, {batches.rows_per_epoch:,} rows an epoch"
    )
    asked = outcomes[1:] or outcomes  # the first is what they are compared with
    _say(_summary(asked, said))
    if all(outcome.refused for outcome in asked):
        raise ConfigError(f"--layouts {parsed.layouts!r}: no run can have any of them, see above")
    return passed


def _json(passed: bool, outcomes: Sequence[Outcome | DataOutcome], **facts: Any) -> str:
    layouts = [outcome.to_json() for outcome in outcomes]
    return json.dumps({"passed": passed, **facts, "layouts": layouts}, allow_nan=False)


def _summary(outcomes: Sequence[Outcome | DataOutcome], said: str) -> str:
    compared = [outcome for outcome in outcomes if outcome.passed is not None]
    n_passed = sum(1 for outcome in compared if outcome.passed)
    seconds = sum(outcome.seconds for outcome in outcomes)
    refused = [outcome.name for outcome in outcomes if outcome.passed is None]
    impossible = f"; not possible: {', '.join(refused)}" if refused else ""
    return (
        f"{n_passed} of {len(compared)} layouts equal one process{impossible}: {said} "
        f"({seconds:.0f} s)"
    )


# -- what people see ----------------------------------------------------------------------------


def _with_progress(outcomes: Iterable[Outcome], names: Sequence[str]) -> Iterator[Outcome]:
    """The outcomes as they come; stderr tells which layout is running, or which one is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        for number, outcome in enumerate(outcomes, start=1):
            mark = "equal" if outcome.passed else printable(f"FAILED, {outcome.problem}", keep="\n")
            print(
                f"{number}/{len(names)} {outcome.case.name}: {mark} ({outcome.seconds:.1f} s)",
                file=sys.stderr,
                flush=True,
            )
            yield outcome
        return
    columns = (
        BarColumn(30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("one process", total=len(names))
        for number, outcome in enumerate(outcomes, start=1):
            if not outcome.passed:
                said = printable(f"✗ {outcome.case.name}: {outcome.problem}", keep="\n")
                console.print(said, style="red")
            following = names[number] if number < len(names) else ""
            progress.update(bar, completed=number, description=following)
            yield outcome


def _layout_table(outcomes: Iterable[Outcome]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for title in ("processes", "loss", "gradient", "weight"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("worst", overflow="fold")
    table.add_column("s", justify="right", no_wrap=True)
    for outcome in outcomes:
        errors = (outcome.loss_error, outcome.gradient_error, outcome.parameter_error)
        # Where nothing differs, nothing is worst.
        worst = outcome.worst if outcome.worst is not None and outcome.worst.error else None
        table.add_row(
            "✓" if outcome.passed else "✗",
            outcome.case.name,
            str(outcome.case.layout.world_size),
            *("–" if error is None else f"{error:.1e}" for error in errors),
            "" if worst is None else worst.subject,
            f"{outcome.seconds:.1f}",
            style=None if outcome.passed else "red",
        )
    return table


def _data_table(outcomes: Iterable[DataOutcome]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("", "layout"):
        table.add_column(title, no_wrap=True)
    table.add_column("processes", justify="right", no_wrap=True)
    table.add_column("batches", overflow="fold")
    for outcome in outcomes:
        mark = {True: "✓", False: "✗", None: "–"}[outcome.passed]
        said = printable(outcome.refused or outcome.problem or (outcome.hash or "")[:16])
        style = "red" if outcome.passed is False else None
        table.add_row(mark, outcome.name, str(outcome.layout.world_size), said, style=style)
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=WIDTH)
    console.print(table)
    console.print()


def _say(text: str) -> None:
    print(printable(text, keep="\n"), flush=True)
