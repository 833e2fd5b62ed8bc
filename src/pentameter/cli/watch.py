"""`pentameter watch`: the runs in a folder on one live page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pentameter.cli.options.arguments import parse

RUNS = Path("runs")


@dataclass(frozen=True)
class WatchArguments:
    """Show the runs in a folder on a page that follows them, until Ctrl-C.

    Runs may be under way, stopped, failed or broken. Nothing is written, and nothing is told to
    anybody but browsers on this machine.
    """

    runs: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[RUNS]")] = RUNS
    """Folder with run folders in it; `runs`, where `train` puts them, need not exist yet."""
    host: str = "127.0.0.1"
    """Address to listen on. There is no login: with 0.0.0.0 everybody in the network may read."""
    port: int = 8001
    """Port to listen on; 0 takes a free one."""


def run(arguments: list[str]) -> int:
    """Serve pages on the runs in a folder until Ctrl-C; return the exit code 0. `arguments` are the
    command line after the verb."""
    asked = parse(WatchArguments, arguments, verb="watch")
    from pentameter.report.watch.board import check_runs_folder
    from pentameter.report.watch.watch_server import WatchServer

    if asked.runs != RUNS or RUNS.exists():  # a first run may be started after this
        check_runs_folder(asked.runs)
    with WatchServer(asked.runs, asked.host, asked.port) as server:
        try:
            print(f"{server.url}  (the runs in {asked.runs}; Ctrl-C ends)", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
