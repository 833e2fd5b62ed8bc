"""A run's events, written to metrics.jsonl and sent to the trackers (TensorBoard, W&B, trackio)."""

from __future__ import annotations

import time
from typing import Any

from pentameter.config.schema import Config
from pentameter.processes.group.world import World
from pentameter.record.events import Event, line_of
from pentameter.record.log_files import LogFile
from pentameter.train.keep.run_folder import RunFolder
from pentameter.train.say.console import Console
from pentameter.train.say.trackers import Trackers, open_trackers


class EventLog:
    """Writes events to metrics.jsonl and to the trackers of the run in `folder`, on rank 0 alone.
    `config.log` names the trackers, `console` prints warnings. `step` steps were completed before
    this start; trackers hide later ones that an earlier start has sent, since they are made
    again."""

    def __init__(
        self, config: Config, folder: RunFolder, step: int, world: World, console: Console
    ) -> None:
        self._is_main, self._folder = world.is_main, folder
        self._log = LogFile(folder.metrics_path, console.say, folder.check_ours)
        self._trackers = Trackers({}, console.say)
        if world.is_main:
            first_step = 0 if folder.checkpoint is None else step + 1
            self._trackers = open_trackers(config, folder, first_step, console.say)

    def write(self, event: Event) -> None:
        """Append an event to metrics.jsonl, with the time, and send it to every tracker. Nothing is
        written or sent once another process has taken over the run folder."""
        if self._is_main:
            self._log.append(line_of(event, time.time()))
            if not self._log.is_closed_for_good:
                self._trackers.write(event)

    def show_sample(self, text: str, step: int) -> None:
        """Send the text sampled at `step` to the trackers; metrics.jsonl does not get it."""
        self._trackers.text("sample", text, step)

    def sync(self) -> dict[str, Any]:
        """Sync metrics.jsonl to disk. Return the state that a checkpoint keeps, for
        `rewind_metrics`: `metrics_bytes`, the size of its complete lines, and `metrics_unwritten`,
        lines that the disk has refused so far."""
        n_bytes = self._log.sync()
        unwritten = [line.decode().rstrip("\n") for line in self._log.unwritten]
        return {"metrics_bytes": n_bytes, "metrics_unwritten": unwritten}

    def finish(self, *, failed: bool) -> None:
        """Close the trackers as the run ends; `failed` marks the run as failed there."""
        self._trackers.finish(failed=failed)

    def close(self) -> None:
        """Close metrics.jsonl, as the run releases its lock. A later `write` opens it again, unless
        another process holds the lock by then."""
        self._log.close(self._folder.check_not_taken)
