"""The launch of a training's processes, on this machine or with the launchers of others, and again
after a loss."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pentameter.config.files.overrides import as_options
from pentameter.disk.held_folder import HeldFolder
from pentameter.errors import ConfigError, StorageError
from pentameter.planning.layouts.layout import BEST, layout_settings, make_layout
from pentameter.processes.launch.local_launch import check_launch, respawn, run_local
from pentameter.processes.launch.program import Command, Preloaded, python_command
from pentameter.record.checkpoints import newest_checkpoint

if TYPE_CHECKING:
    from pentameter.config.schema import Config

NODES_RESTARTS = 3
"""`--respawn` for `--nodes`, if it is not given."""

LOOK_SECONDS = 1.0
"""Seconds between two looks at the run folder while processes train there."""


@dataclass(frozen=True)
class Launch:
    """The program that `train` starts on this machine, if it runs in several processes: the
    program, its arguments, and the rules for starting it again."""

    program: Preloaded
    """The function that trains as one rank, for processes that may be started again. It is closed
    at the end."""
    arguments: list[str]
    """The command line after `train`, without the options for the launcher and --resume."""
    n_processes: int
    config: Config
    """The configuration for all of these processes."""
    layout: str | None
    resume: str
    folder: Path
    """The run folder."""
    restarts: int | None
    oversubscribe: bool
    check_fit: bool
    """Whether to refuse a run that exceeds the memory; False with --force."""

    def here(self, chosen: Callable[[int], Config]) -> None:
        """Train in processes on this machine alone. After a lost process start them again, at most
        `restarts` times without progress. `chosen` returns the configuration for a number of
        processes; with --layout best it is called again after each loss."""
        if not self.restarts:
            arguments, n_processes = self._fitted(self.n_processes, self.config, self.resume)
            run_local(Command(python_command("train", *arguments)), n_processes)
            return
        seen = _SeenFolder(self.folder)
        with closing(self.program) as program:

            def start(n_processes: int, again: bool) -> None:
                is_other = self.layout == BEST and n_processes != self.n_processes
                config = chosen(n_processes) if is_other else self.config
                resume = self.resume
                if again:
                    seen.check()
                    resume = self._resume(has_checkpoint=bool(seen.newest))
                program.arguments, n_processes = self._fitted(n_processes, config, resume)
                run_local(program, n_processes, look=seen.look)

            respawn(
                start,
                self.n_processes,
                self.restarts,
                may_shrink=self.layout == BEST,
                progress=lambda: newest_checkpoint(self.folder),
            )

    def on_nodes(self, nodes: str) -> None:
        """Train with the launchers of other machines; `nodes` is the value of --nodes. Raises
        ConfigError if the number of nodes may change and the layout cannot."""
        from pentameter.processes.launch.node_launch import run_on_nodes
        from pentameter.processes.nodes.attempts import Rules

        if sys.platform != "linux":
            raise ConfigError("--nodes asks Linux for network interfaces; start with torchrun here")
        least, most = parse_nodes(nodes)
        if least != most and self.layout != BEST:
            raise ConfigError(
                f"--nodes {nodes}: each number of nodes needs a layout that fits it; add "
                f"--layout {BEST}, or name one number of nodes"
            )
        if self.resume == "never":
            raise ConfigError(
                "--nodes starts the same command again after a loss, and --resume never would "
                "refuse it; leave it out"
            )
        if self.layout != BEST:
            self._check(self.config, most * self.n_processes, local_size=self.n_processes)
        restarts = NODES_RESTARTS if self.restarts is None else self.restarts
        layout = [] if self.layout is None else [f"--layout={self.layout}"]
        with closing(self.program) as program:

            def prepare(has_checkpoint: bool) -> None:
                resume = self._resume(has_checkpoint=has_checkpoint)
                program.arguments = [*self.arguments, f"--resume={resume}", *layout]

            run_on_nodes(
                program,
                self.n_processes,
                self.folder / "nodes",
                Rules(least, most, restarts),
                lambda: newest_checkpoint(self.folder),
                prepare,
            )

    def _resume(self, *, has_checkpoint: bool) -> str:
        """Return the value of `--resume` for processes that are started after earlier ones have
        ended: once the run has had a checkpoint they must resume from one, so that the run never
        begins again from step 0."""
        if self.resume == "extend":  # needs one as well
            return "extend"
        return "must" if has_checkpoint else "auto" if self.resume == "never" else self.resume

    def _fitted(self, n_processes: int, config: Config, resume: str) -> tuple[list[str], int]:
        """Return (arguments of `train` for each process, number of processes). The number is
        `n_processes`, or less if the best layout cannot use all."""
        if self.layout == BEST:
            n_processes = make_layout(config.parallel).world_size
        self._check(config, n_processes)
        # The processes get the layout as it was chosen.
        layout = [] if self.layout is None else as_options(layout_settings(config))
        return [*self.arguments, f"--resume={resume}", *layout], n_processes

    def _check(self, config: Config, n_processes: int, local_size: int | None = None) -> None:
        check_launch(
            config,
            n_processes,
            None,
            oversubscribe=self.oversubscribe,
            check_fit=self.check_fit,
            local_size=local_size,
        )


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the least and the most nodes that `--nodes` names: `2` or `1:4`. Raises
    ConfigError."""
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"--nodes {text} must be MIN:MAX, like 1:4, or one number of nodes")
    return least, most


class _SeenFolder:
    """A launcher's view of the run folder at `path` while its processes train there: whether it is
    still the same folder, and its newest checkpoint."""

    def __init__(self, path: Path) -> None:
        self.newest = ""
        """Name of the newest checkpoint that was seen; "" for none."""
        self._path = path
        self._held: HeldFolder | None = None
        self._looked_at = -LOOK_SECONDS

    def look(self) -> None:
        """Every LOOK_SECONDS, record the folder's identity and its newest checkpoint. If the folder
        is missing at the moment, there is no checkpoint."""
        if time.monotonic() < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        with suppress(OSError, StorageError):
            self._held = self._held or HeldFolder.at(self._path)
            self.check()
            self.newest = newest_checkpoint(self._path) or self.newest

    def check(self) -> None:
        """Raise StorageError unless the folder at the path is still the one that was seen first."""
        checkpoint = self._path / "checkpoints" / self.newest
        if self._held is not None:
            self._held.check(lambda: bool(self.newest) and checkpoint.is_dir())
