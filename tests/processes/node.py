"""A launcher of `--nodes` without torch: `node.py FOLDER` starts processes that wait for `go`."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from pentameter.cli import main as cli
from pentameter.disk.lock import RunLock
from pentameter.errors import ConfigError, InterruptedRunError
from pentameter.processes.launch.node_launch import run_on_nodes
from pentameter.processes.launch.program import Command
from pentameter.processes.launch.stop_signals import handling_stop_signals
from pentameter.processes.launch.worker import watch_launcher
from pentameter.processes.nodes.attempts import Rules


def work(folder: Path) -> None:
    """Note who this is, wait, and end as a run does: well, stopped and saved, or refused. Rank 0
    holds the run folder."""
    watch_launcher()
    stopped: list[int] = []
    lock = RunLock(folder / "run.lock") if os.environ["RANK"] == "0" else nullcontext()
    with lock, handling_stop_signals(lambda number, frame: stopped.append(number)):
        here = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PENTAMETER_STORE"
        who = folder / f"pid-{os.getpid()}"
        who.with_suffix(".new").write_text(" ".join(os.environ[name] for name in here))
        who.with_suffix(".new").rename(who)
        while not stopped and not (folder / "go").exists():
            time.sleep(0.02)
    if stopped:
        raise InterruptedRunError("stopped, and saved", agreed=True)
    if (folder / "go").read_text():
        raise ConfigError((folder / "go").read_text())


def act(verb: str, arguments: list[str]) -> int:
    folder = Path(arguments[0])
    if verb == "work":
        work(folder)
        return 0
    program = Command([sys.executable, __file__, "work", str(folder)])
    rules = Rules(least=1, most=2, n_restarts=3)
    run_on_nodes(program, 2, folder / "nodes", rules, lambda: "")
    return 0


if __name__ == "__main__":
    cli._run_verb = act
    raise SystemExit(cli.main())
