"""`pentameter compare`: several runs on one page and in one table."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pentameter.cli.options.arguments import parse
from pentameter.errors import printable, remark


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
    from pentameter.report.text.comparison import comparison_lines
    from pentameter.report.watch.comparison import compare_runs, write_comparison

    comparison = compare_runs(asked.runs)
    remark(*comparison.unread)
    page = write_comparison(comparison, asked.out)
    if asked.json:
        print(json.dumps({"page": str(page), **comparison.to_json()}, ensure_ascii=False))
        return 0
    for line in comparison_lines(comparison, shutil.get_terminal_size((100, 24)).columns):
        print(printable(line))
    print(f"\n{page}")
    return 0
