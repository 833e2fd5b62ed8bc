"""`pentameter report`: a run as one HTML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pentameter.cli.options.arguments import parse
from pentameter.errors import ConfigError, remark


@dataclass(frozen=True)
class ReportArguments:
    """Write a report on a run, one file to open in a browser or to print.

    A run in progress can be reported at any time, and again later.
    """

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """The run's folder, runs/NAME."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.html")] = None
    """The page's file; RUN_DIR/report.html when absent."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also save the loss curve alone: .svg, .png or .pdf."""


def run(arguments: list[str]) -> int:
    """Write the report on the run that `arguments` (the command line after the verb) name, print
    its path, and return the exit code 0."""
    asked = parse(ReportArguments, arguments, verb="report")
    from pentameter.record.reading import check_run_folder, read_run
    from pentameter.report.figures.markup import write_page
    from pentameter.report.figures.plots import loss_figure, save_figure
    from pentameter.report.pages.page import render_page

    record = read_run(asked.run_dir)
    check_run_folder(asked.run_dir)
    remark(*record.unread)
    if asked.plot is not None:
        figure = loss_figure(record)
        if figure is None:
            raise ConfigError(f"--plot {asked.plot}: {asked.run_dir} has no loss to draw yet")
        print(save_figure(figure, asked.plot))
    print(write_page(asked.out or asked.run_dir / "report.html", render_page(record)))
    return 0
