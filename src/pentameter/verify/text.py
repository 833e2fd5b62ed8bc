"""Text and tables that show outcomes of `pentameter verify` on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pentameter.errors import printable
from pentameter.verify.compare import Outcome
from pentameter.verify.data import DataOutcome


def summary(outcomes: Sequence[Outcome | DataOutcome], said: str) -> str:
    """Return the closing sentence: `3 of 3 layouts equal one process: SAID (12 s)`. `said` names
    the numbers in which they are equal."""
    compared = [outcome for outcome in outcomes if outcome.passed is not None]
    n_passed = sum(1 for outcome in compared if outcome.passed)
    seconds = sum(outcome.seconds for outcome in outcomes)
    refused = [outcome.name for outcome in outcomes if outcome.passed is None]
    impossible = f"; not possible: {', '.join(refused)}" if refused else ""
    return (
        f"{n_passed} of {len(compared)} layouts equal one process{impossible}: {said} "
        f"({seconds:.0f} s)"
    )


def layout_table(outcomes: Iterable[Outcome]) -> Table:
    """Return a table with one row per layout: its largest errors, the worst quantity's name
    and the seconds."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for title in ("processes", "loss", "gradient", "weight"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("worst", overflow="fold")
    table.add_column("s", justify="right", no_wrap=True)
    for outcome in outcomes:
        errors = (outcome.loss_error, outcome.gradient_error, outcome.parameter_error)
        # If nothing differs, nothing is worst.
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


def data_table(outcomes: Iterable[DataOutcome]) -> Table:
    """Return a table with one row per layout: the start of its batches' hash, or the
    problem with it."""
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


def with_progress(outcomes: Iterable[Outcome], names: Sequence[str]) -> Iterator[Outcome]:
    """Yield outcomes as they come, and report each on stderr, with a bar on a terminal. names: the
    layouts' names, in order."""
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
