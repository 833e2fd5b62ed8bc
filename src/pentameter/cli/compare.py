"""`pentameter compare`: several runs on one page and in one table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pentameter.cli.options.arguments import parse
from pentameter.errors import printable, remark

if TYPE_CHECKING:
    from pentameter.report.watch.comparison import Comparison

LONGEST_CELL = 32


@dataclass(frozen=True)
class CompareArguments:
    """Compare runs on one page to open in a browser, and in a table here.

    Runs may be under way, stopped or failed.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN RUN…")]
    """Run folders, runs/NAME."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.html")] = Path("compare.html")
    """The page's file; one that is there is replaced."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object instead of the table."""


def run(arguments: list[str]) -> int:
    """Compare the runs that `arguments` (the command line after the verb) name: write the page,
    print the table, and return the exit code 0."""
    asked = parse(CompareArguments, arguments, verb="compare")
    from pentameter.report.figures.markup import write_page
    from pentameter.report.watch.comparison import compare_runs, render_comparison

    comparison = compare_runs(asked.runs)
    remark(*(words for run in comparison.runs for words in run.record.unread))
    page = write_page(asked.out, render_comparison(comparison))
    if asked.json:
        print(json.dumps({"page": str(page), **comparison.to_json()}, ensure_ascii=False))
        return 0
    # Names and settings are read from files, and may hold what a terminal would act on.
    for line in _lines(comparison, shutil.get_terminal_size((100, 24)).columns):
        print(printable(line))
    print(f"\n{page}")
    return 0


def _lines(comparison: Comparison, width: int) -> Iterator[str]:
    """Yield the table's lines, a row per run, at most `width` characters wide; columns that do not
    fit follow in further tables below. After the tables come the results that are the same for all
    runs, a line each, and the verdict on which run is best."""
    from rich.cells import cell_len, set_cell_size

    runs, leaders = comparison.runs, comparison.ranking.leaders
    ranks = [f"{i}" if comparison.ranking.is_ranked else "" for i in range(1, len(runs) + 1)]
    names = [f"{run.label} *" if run.label in leaders else run.label for run in runs]
    first = [("#", ranks, True), ("run", names, False)]
    columns = [(column.title, column.cells, column.is_number) for column in comparison.columns]

    def padded(title: str, cells: Sequence[str], is_number: bool) -> list[str]:
        texts = [_short(text) for text in (title, *cells)]
        widest = max(map(cell_len, texts))
        if is_number:
            return [" " * (widest - cell_len(text)) + text for text in texts]
        return [set_cell_size(text, widest) for text in texts]

    beside = [padded(*column) for column in first]
    others = [padded(*column) for column in columns]
    widths = [cell_len(column[0]) for column in others]
    for number, group in enumerate(_groups(widths, width - sum(len(c[0]) + 2 for c in beside) + 2)):
        if number:
            yield ""
        for cells in zip(*beside, *(others[i] for i in group), strict=True):
            yield "  ".join(cells).rstrip()
    yield ""
    if leaders:
        yield "* best"
    for title, cell in comparison.alike:
        yield f"{title}: {cell}"
    yield from filter(None, (comparison.ranking.verdict, comparison.ranking.noise))


def _short(cell: str) -> str:
    from rich.cells import cell_len, set_cell_size

    if cell_len(cell) <= LONGEST_CELL:
        return cell
    return f"{set_cell_size(cell, LONGEST_CELL - 1).rstrip()}…"


def _groups(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yield lists of column indices, in order, that fit in `room` characters; a column that is too
    wide has a list to itself."""
    group: list[int] = []
    for index, width in enumerate(widths):
        if group and sum(widths[i] + 2 for i in group) + width + 2 > room:
            yield group
            group = []
        group.append(index)
    yield group
