"""A run's events: metrics.jsonl, and the trackers that receive the same events."""

from __future__ import annotations

from typing import Any

from pentameter.config.schema import Config
from pentameter.processes.world import World
from pentameter.train.console import Console
from pentameter.train.log_files import LogFile, event_line
from pentameter.train.run_folder import RunFolder
from pentameter.train.trackers import Trackers, open_trackers


class EventLog:
    """metrics.jsonl and the trackers for the run in `folder`, which goes on after `step`. Only rank
    0 writes."""

    def __init__(
        self, config: Config, folder: RunFolder, step: int, world: World, console: Console
    ) -> None:
        self._is_main = world.is_main
        self._log = LogFile(folder.metrics_path, console.say, folder.check_there)
        self._trackers = Trackers({}, console.say)
        if world.is_main:
            first_step = 0 if folder.checkpoint is None else step + 1
            self._trackers = open_trackers(config, folder, first_step, console.say)

    def write(self, event: str, **values: Any) -> None:
        """Record one event, in the log and in every tracker."""
        if self._is_main:
            self._log.append(event_line(event, values))
            self._trackers.write(event, **values)

    def show_text(self, name: str, text: str, step: int) -> None:
        """Show a text in the trackers alone."""
        self._trackers.text(name, text, step)

    def sync(self) -> dict[str, Any]:
        """Sync metrics.jsonl, and return its record for a checkpoint, which `rewind_metrics` reads:
        `metrics_bytes`, the size in complete lines, and `metrics_unwritten`, the lines that wait
        for the disk."""
        n_bytes = self._log.sync()
        unwritten = [line.decode().rstrip("\n") for line in self._log.unwritten]
        return {"metrics_bytes": n_bytes, "metrics_unwritten": unwritten}

    def finish(self, *, failed: bool) -> None:
        """Finish the trackers: the run has ended."""
        self._trackers.finish(failed=failed)

    def close(self) -> None:
        """Close metrics.jsonl."""
        self._log.close()
