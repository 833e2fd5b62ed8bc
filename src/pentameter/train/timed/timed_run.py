"""A run of a given time: the settings chosen for it, and their record in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pentameter.config.files.command_source import PRESET_FOR_TEXT
from pentameter.config.files.load import (
    Overrides,
    flat_overrides,
    load_config,
    preset_names,
)
from pentameter.config.fingerprint import config_hash, not_the_training
from pentameter.config.model.former_keys import former_path
from pentameter.config.schema import Config
from pentameter.data.progress import ProgressLines
from pentameter.disk.atomic import make_folder, read_own_json, write_atomic
from pentameter.errors import ConfigError, CorruptError, remark
from pentameter.formatting import duration
from pentameter.optim.schedule import cooldown_start
from pentameter.record.checkpoints import list_checkpoints
from pentameter.train.keep.own_configuration import configuration_to_train
from pentameter.train.keep.resuming import NEW_FOLDER
from pentameter.train.run import TrainingRun
from pentameter.train.timed.choosing import Choice, choose_for_time, choose_to_go_on
from pentameter.train.timed.time_budget import TimeBudget, parse_time, process_start
from pentameter.train.timed.time_kept import TimeKept

RECORD = "time.json"
"""The file in a run folder that records the time asked for and the settings chosen."""
DECIDES_LENGTH = ("train.steps", "train.epochs", "schedule.decay_steps")
"""Keys that set a run's length, and so exclude a time."""


class TimedRun:
    """A run of a given time, and the settings chosen for it.

    source, overrides: what to train, as `configuration_to_train` takes it. Settings in the
        overrides stay as they are. For a text and for the quickstart, without `init_from`, model
        size and everything that depends on it are chosen; for another preset or configuration only
        the length.
    time: `90s`, `30m`, `2h` or `1h30m`.
    started: the moment from which it counts, in seconds on the monotonic clock; by default this
        process's start.
    run_dir: the run folder; runs/NAME by default.
    init_from: the model that the run begins with; None for random weights.

    Raises ConfigError for another form of time, and for overrides that decide the length.
    """

    def __init__(
        self,
        source: str | Path | Config | None,
        overrides: Overrides,
        time: str,
        *,
        run_dir: Path | None = None,
        init_from: Path | None = None,
        started: float | None = None,
    ) -> None:
        self.budget = TimeBudget(parse_time(time), process_start() if started is None else started)
        self._time, self._named = time, source or init_from
        self._source, given = configuration_to_train(source, overrides, init_from)
        self._given = flat_overrides(given)
        for path in DECIDES_LENGTH:
            if path in self._given:
                raise ConfigError(
                    f"--{path} and --time both say how long the run is; leave one of them out"
                )
        self._asked = self._load({})
        self._folder = run_dir or Path("runs") / self._asked.name
        self._chooses_size = init_from is None and self._source == PRESET_FOR_TEXT
        self._tunes = init_from is not None and _leaves_rate_open(self._source, init_from)
        self._settings: Mapping[str, Any] = {}
        self.goes_on_from: int | None = None
        """The step, before a shorter run's cool-down, from which this run goes on; None for a run
        that begins anew."""

    def choose(
        self, resume: str = "auto", *, keep: bool = True, say: Callable[[str], None] = remark
    ) -> Config:
        """Choose settings for the time by a trial, and return the configuration with them; `say`
        gets the reasons, a line each. With `keep`, record the choice in the run folder.

        If the folder records a choice for the same request, return that one without a trial. If it
        holds the same run of a shorter time, complete, choose how it goes on, unless `resume` is
        `never`. Raises ConfigError if
        the folder holds a run for another request.
        """
        say(f"--time {self._time}: the text is read and some steps are timed, to choose what fits")
        record = _read(self._folder / RECORD)
        if record is not None and record.get("asked") == self._request():
            self._settings, self.goes_on_from = record["chosen"], record.get("goes_on_from")
            self._take_rest(record.get("seconds_before", 0.0))
            return self._load(self._settings)
        if (self._folder / "config.toml").exists():
            if record is None or resume == "never" or not self._asks_for_more_than(record):
                raise ConfigError(self._other_run(record))
            chosen = self._choose_to_go_on(record, say)
        else:
            chosen = choose_for_time(
                self._load,
                self._given,
                self.budget,
                sizes=self._chooses_size,
                tunes=self._tunes,
                progress=ProgressLines(say),
            )
        self._settings = chosen.settings
        if keep:
            self._write()
        for reason in chosen.reasons:
            say(reason)
        return chosen.config

    def _choose_to_go_on(self, record: Mapping[str, Any], say: Callable[[str], None]) -> Choice:
        """Choose the further steps of the run of a shorter time that the folder holds, of which
        `record` tells. Raises ConfigError if it is not complete, or cannot go on."""
        before = record["asked"]["seconds"]
        made = load_config(self._folder / "config.toml")
        steps = [each.step for each in list_checkpoints(self._folder / "checkpoints")]
        if not steps or steps[0] < (made.train.steps or 0):
            raise ConfigError(
                f"{self._folder} holds a run of --time {duration(before)} that is not complete; "
                f"finish it with that time, then ask for {duration(self.budget.seconds)} in all"
            )
        cools_at = cooldown_start(made.schedule)
        uncooled = [step for step in steps if cools_at is not None and 0 < step <= cools_at]
        if not uncooled:
            raise ConfigError(
                f"{self._folder} holds a run of --time {duration(before)}, and no checkpoint from "
                f"before its learning rate fell (schedule.name={made.schedule.name!r}, "
                "checkpoint.keep_before_cooldown), from which a longer one could go on. For "
                f"another run, {NEW_FOLDER}"
            )
        begun = self.goes_on_from = max(uncooled)
        self._take_rest(before)
        more = choose_to_go_on(
            self._load, self._given, self.budget, record["chosen"], begun, ProgressLines(say)
        )
        reason = (
            f"goes on from step {begun:,}, before the cool-down of --time {duration(before)}, with "
            f"the other {duration(self.budget.seconds)}: what came after it is made anew"
        )
        return replace(more, reasons=(reason, *more.reasons))

    def _asks_for_more_than(self, record: Mapping[str, Any]) -> bool:
        """Return True if `record` is of the same request for a shorter time."""
        return record["asked"] == {**self._request(), "seconds": record["asked"]["seconds"]} and (
            record["asked"]["seconds"] < self.budget.seconds
        )

    def _take_rest(self, before: float) -> None:
        """Take the first `before` seconds off the time, which a shorter run has had."""
        self.budget = replace(self.budget, seconds=self.budget.seconds - before, before=before)

    def moved(self, kept: TimeKept, run: TrainingRun) -> Config | None:
        """Return the configuration with the new length that the hook `kept` asked for, and record
        it in the run folder; None if it asked for none."""
        if kept.moved is None:
            return None
        steps = kept.moved.steps
        at_the_end = [
            path
            for path in ("train.eval_interval", "train.sample_interval")
            if self._settings.get(path) == run.plan.steps
        ]
        self._settings = {
            **self._settings,
            **dict.fromkeys(["train.steps", *at_the_end], steps),
            "schedule.cooldown_steps": kept.moved.cooldown_steps,
        }
        self._write()
        return self._load(self._settings)

    def _load(self, settings: Mapping[str, Any]) -> Config:
        return load_config(self._source, {**settings, **self._given})

    def _request(self) -> dict[str, Any]:
        """Return the values that identify the request: seconds, configuration hash and the keys
        that the user set."""
        given = sorted(map(former_path, self._given.keys() - not_the_training()))
        return {"seconds": self.budget.asked, "config": config_hash(self._asked), "given": given}

    def _other_run(self, record: Mapping[str, Any] | None) -> str:
        if record is None:
            said = "a run that was begun without --time; leave that out to continue it"
        elif self.budget.seconds < record["asked"]["seconds"]:
            asked = duration(record["asked"]["seconds"])
            said = f"a run of --time {asked}; ask for that to continue it, or for more to go on"
        else:
            said = "a run of --time with other settings; give those to continue it"
        return (
            f"{self._folder} holds {said}, or {self._folder}/config.toml in the place of "
            f"{self._named}. For another run, {NEW_FOLDER}"
        )

    def _write(self) -> None:
        make_folder(self._folder)
        record: dict[str, Any] = {"asked": self._request(), "chosen": dict(self._settings)}
        if self.goes_on_from is not None:
            record |= {"goes_on_from": self.goes_on_from, "seconds_before": self.budget.before}
        write_atomic(self._folder / RECORD, json.dumps(record, indent=1).encode() + b"\n")


def _leaves_rate_open(source: str | Path | Config, init_from: Path) -> bool:
    """Return True for a preset and for the configuration of the model in the folder `init_from`:
    their learning rate is one for random weights. A user's own file says its rate itself."""
    if isinstance(source, Config):
        return False
    return str(source) in preset_names() or Path(source).resolve().is_relative_to(
        init_from.resolve()
    )


def check_timed(resume: str, n_processes: int) -> None:
    """Raise ConfigError if a run with this value of `--resume` and `n_processes` processes cannot
    be given a time (`--time`)."""
    if n_processes > 1:
        raise ConfigError(
            "--time measures the steps of one process, and several were asked for; write the "
            "configuration with --time and --print-config, and train that file with --nproc"
        )
    if resume not in ("auto", "never", "must"):
        raise ConfigError(
            f"--resume {resume} goes on with a run whose length --time does not know; leave --time "
            "out, and say --train.steps"
        )


def _read(path: Path) -> dict[str, Any] | None:
    """Return the recorded choice in the file `path`; None if it is missing. Raises CorruptError if
    it is damaged."""
    if not path.exists():
        return None
    record = read_own_json(path)
    try:
        float(record["asked"]["seconds"])
        dict(record["chosen"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            f"{path} is damaged; remove it, and give {path.parent}/config.toml to continue the run"
        ) from error
    return record
