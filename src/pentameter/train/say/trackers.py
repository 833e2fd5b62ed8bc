"""TensorBoard, W&B and trackio: services that display a run's events while it trains.

A tracker receives the events in metrics.jsonl, text samples and the resolved configuration. One
that raises is dropped with a warning: the service that watches a run must never end it, nor delay
it for long.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pentameter.config.files.write import to_toml
from pentameter.config.schema import Config, LogConfig
from pentameter.errors import missing_package
from pentameter.record.events import Event, RunEnd, RunStart
from pentameter.train.keep.run_folder import RunFolder

T = TypeVar("T")

FINISH_SECONDS = 8.0  # a stop signal promises to be gone within ten
UNTOLD = (RunStart, RunEnd)
"""Events that trackers do not receive: they display the start and end of a run by themselves."""


class TensorBoardTracker:
    """Writes event files to `folder`, for `tensorboard --logdir`. Steps from `first_step` on that
    an earlier start wrote are hidden; `configuration` is TOML, written once."""

    def __init__(self, folder: Path, configuration: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        is_new = first_step == 0 or not folder.exists()
        self._folder = folder
        # hides an earlier start's steps from `first_step` on: those are made again
        self._writer = SummaryWriter(str(folder), purge_step=first_step)
        if is_new:
            self.text("config", configuration, 0)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add a point at `step` to each curve in `values`, "group/name" → value."""
        self._check_folder()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # written before the checkpoint that follows: a killed run does not make it again
        self._writer.flush()

    def text(self, name: str, text: str, step: int) -> None:
        """Add a text at `step`, as a code block: TensorBoard would read it as Markdown."""
        self._check_folder()
        block = "".join(f"    {line}\n" for line in text.split("\n"))
        self._writer.add_text(name, block, step)

    def finish(self, *, failed: bool) -> None:
        """Write the remaining events and close the file; `failed` changes nothing here."""
        self._check_folder()
        self._writer.close()

    def _check_folder(self) -> None:
        """Raise FileNotFoundError if the event files' folder was removed. Called before each write,
        since TensorBoard's writer thread would otherwise print a traceback."""
        if not self._folder.is_dir():
            raise FileNotFoundError(f"{self._folder} is not there any more")


class ProjectTracker:
    """A run in a W&B or trackio project. `module` is wandb or trackio, which have the same calls;
    `run` is the object that its `init` returned."""

    def __init__(self, module: Any, run: Any) -> None:
        self._module, self._run = module, run
        # Before a resume, the tracker may have received steps that were not saved and are made
        # again. They give the same numbers, so they are left out. trackio has no public API.
        self._first_step: int = getattr(run, "starting_step", getattr(run, "_next_step", 0))
        self._latest_step = 0

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log `values`, "group/name" → value, to the run's history at `step`."""
        self._log(dict(values), step)

    def text(self, name: str, text: str, step: int) -> None:
        """Log a text at `step` as HTML, which both services display."""
        self._log({name: self._module.Html(f"<pre>{html.escape(text)}</pre>")}, step)

    def finish(self, *, failed: bool) -> None:
        """Mark the run as finished, or as failed if the service distinguishes the two."""
        how = {"exit_code": int(failed)} if self._module.__name__ == "wandb" else {}
        self._run.finish(**how)

    def _log(self, values: dict[str, Any], step: int) -> None:
        """Log values at their step, unless an earlier start logged it. A checkpoint's values may
        come after later steps; they are logged at the latest one, as these services drop a step
        that goes back."""
        if step >= self._first_step:
            self._latest_step = max(step, self._latest_step)
            self._run.log(values, step=self._latest_step)


Tracker = TensorBoardTracker | ProjectTracker


class Trackers:
    """All trackers of a run. `openers` maps each tracker's name to a function that opens it. A
    tracker is dropped, with a warning passed to `say`, at its first call that raises."""

    def __init__(
        self, openers: Mapping[str, Callable[[], Tracker]], say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._trackers: dict[str, Tracker] = {}
        for name, open_tracker in openers.items():
            tracker = self._guard(name, open_tracker)
            if tracker is not None:
                self._trackers[name] = tracker

    def write(self, event: Event) -> None:
        """Send an event to every tracker. Its finite numbers become curves named EVENT/KEY (an
        evaluation's SPLIT/KEY, a layer's EVENT/layer-LAYER/KEY). Its strings, such as the reason of
        a skipped step, are sent as texts, except a checkpoint's path. Events of the kinds in UNTOLD
        are not sent."""
        if isinstance(event, UNTOLD):
            return
        values, step = event.values(), event.step
        del values["step"]
        group = str(values.pop("split", event.event))
        if (layer := values.pop("layer", None)) is not None:
            group += f"/layer-{layer}"
        numbers = {
            f"{group}/{key}": float(value)
            for key, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        if numbers:
            self._each("scalars", numbers, step)
        for key, value in values.items():
            if isinstance(value, str) and key != "path":
                self._each("text", f"{group}/{key}", value, step)

    def text(self, name: str, text: str, step: int) -> None:
        """Send a text to every tracker, under `name` at `step`."""
        self._each("text", name, text, step)

    def finish(self, *, failed: bool) -> None:
        """Finish every tracker, as failed or not; they receive nothing afterwards."""
        self._each("finish", failed=failed)
        self._trackers.clear()

    def _each(self, method: str, *arguments: Any, **named: Any) -> None:
        for name, tracker in list(self._trackers.items()):
            self._guard(name, partial(getattr(tracker, method), *arguments, **named))

    def _guard(self, name: str, call: Callable[[], T]) -> T | None:
        """Return the result of `call`. If it raises, drop the tracker `name` and return None."""
        try:
            return call()
        except Exception as error:  # a library's own error; the run must survive every one
            self._trackers.pop(name, None)
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._say(f"warning: log.{name}: {lines[0]}; the run goes on without it")
            return None


def require_trackers(log: LogConfig) -> None:
    """Raise ConfigError if a package that `log` needs is not installed; imports none of them."""
    for name in ("tensorboard", "wandb", "trackio"):
        if not getattr(log, name):
            continue
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a plain folder with that name, as wandb leaves
            raise missing_package(f"log.{name}={getattr(log, name)!r}", name, name)


def open_trackers(
    config: Config, folder: RunFolder, first_step: int, say: Callable[[str], None]
) -> Trackers:
    """Open the trackers that `config.log` names. `first_step` is the first step that this start
    makes: TensorBoard hides it and later ones from an earlier start. A tracker that cannot start is
    dropped, with a warning passed to `say`."""
    openers: dict[str, Callable[[], Tracker]] = {}
    log = config.log
    if log.tensorboard:
        openers["tensorboard"] = lambda: TensorBoardTracker(
            folder.path / "tensorboard", to_toml(config), first_step
        )
    if log.wandb is not None:
        openers["wandb"] = partial(_open_wandb, log.wandb, config, folder)
    if log.trackio is not None:
        openers["trackio"] = partial(_open_trackio, log.trackio, config, folder)
    return Trackers(openers, say)


def _open_wandb(project: str, config: Config, folder: RunFolder) -> Tracker:
    wandb = importlib.import_module("wandb")
    run = wandb.init(
        project=project,
        id=folder.run_id,
        name=config.name,
        resume="allow",
        dir=str(folder.path),
        config=config.model_dump(mode="json"),
        settings=wandb.Settings(
            console="off",  # the live line would fill its log; log.txt has what was said
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        ),
    )
    return ProjectTracker(wandb, run)


def _open_trackio(project: str, config: Config, folder: RunFolder) -> Tracker:
    trackio = importlib.import_module("trackio")
    run = trackio.init(
        project=project,
        name=f"{config.name}-{folder.run_id[:8]}",  # trackio resumes by name
        resume="allow",
        config=config.model_dump(mode="json"),
        embed=False,
    )
    return ProjectTracker(trackio, run)
