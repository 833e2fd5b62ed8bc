"""The option `--time`: the time that a run may take, and the settings chosen for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.cli.options.layout_option import options
from pentameter.errors import ConfigError, CorruptError

if TYPE_CHECKING:
    from pentameter.autotune.time_budget import TimeBudget
    from pentameter.autotune.time_kept import TimeKept
    from pentameter.config.schema import Config
    from pentameter.data.progress import Progress
    from pentameter.train.run import TrainingRun

SECONDS = {"h": 3600, "m": 60, "s": 1}
LONGEST_SECONDS = 366 * 86_400
RECORD = "time.json"
"""The file in a run folder that records the time asked for and the settings chosen."""
DECIDES_LENGTH = ("train.steps", "train.epochs", "schedule.decay_steps")
"""Keys that set a run's length, and so exclude `--time`."""


def parse_time(text: str) -> float:
    """Return `90s`, `30m`, `2h` or `1h30m` in seconds. Raises ConfigError for another form."""
    found = re.fullmatch(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", text.strip().lower())
    if not text.strip() or found is None:
        raise ConfigError(
            f"--time {text!r} is no duration; write hours, minutes and seconds, as 90s, 30m, 2h or "
            "1h30m"
        )
    seconds = sum(
        int(n or 0) * each for n, each in zip(found.groups(), SECONDS.values(), strict=True)
    )
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ConfigError(f"--time {text!r} must be between one second and a year")
    return float(seconds)


@dataclass
class TimedRun:
    """A run of `train --time`: the command line's arguments, its time budget and the settings
    chosen."""

    source: str
    overrides: Sequence[str]
    run_dir: Path | None
    init_from: Path | None
    budget: TimeBudget
    settings: Mapping[str, Any]
    """Chosen settings, dotted path → value; empty before `config` is called."""

    def config(self, progress: Progress, *, keep: bool) -> tuple[Config, tuple[str, ...]]:
        """Choose settings for the time by a trial. Return the configuration with them, and the
        reasons, a line each. With `keep`, record the choice in the run folder.

        If the folder records a choice for the same request, return that one without a trial, and no
        reasons. `progress` is called while data is prepared. Raises ConfigError if the folder holds
        a run for another request.
        """
        from pentameter.autotune.time_budget import choose_for_time

        asked = self._load({})
        folder = self._folder(asked)
        record = _read(folder / RECORD)
        if record is not None and record.get("asked") == self._asked(asked):
            self.settings = record["chosen"]
            return self._load(self.settings), ()
        if (folder / "config.toml").exists():
            raise ConfigError(self._other_run(folder, record))
        chosen = choose_for_time(
            self._load,
            self._given(),
            self.budget,
            sizes=self._takes_sizes,
            progress=progress,
        )
        self.settings = chosen.settings
        if keep:
            self._write(folder)
        return chosen.config, chosen.reasons

    def moved(self, kept: TimeKept, run: TrainingRun) -> Config | None:
        """Return the configuration with the new length that the hook `kept` asked for, and record
        it in the run folder; None if it asked for none."""
        if kept.moved is None:
            return None
        end = kept.moved
        self.settings = {
            **self.settings,
            "train.steps": end.steps,
            "schedule.cooldown_steps": end.cooldown_steps,
        }
        for path in ("train.eval_interval", "train.sample_interval"):
            if self.settings.get(path) == run.plan.steps:  # at the end alone
                self.settings = {**self.settings, path: end.steps}
        self._write(run.run_dir)
        return self._load(self.settings)

    # -- what was asked for -------------------------------------------------------------------

    def _load(self, settings: Mapping[str, Any]) -> Config:
        from pentameter.config.files.load import load_config

        source, overrides = self._resolved()
        return load_config(source, [*options(settings), *overrides])

    def _resolved(self) -> tuple[str, list[str]]:
        from pentameter.config.files.command_source import configuration_of

        return configuration_of(self.source, list(self.overrides), self.init_from)

    @property
    def _takes_sizes(self) -> bool:
        """True if the model's size is to be chosen, too: if the command names a text or the
        quickstart, without --init-from. For another preset or file only the length is chosen."""
        from pentameter.config.files.command_source import PRESET_FOR_TEXT

        return self.init_from is None and self._resolved()[0] == PRESET_FOR_TEXT

    def _given(self) -> list[str]:
        from pentameter.config.files.overrides import parse_overrides

        given = [path for path, _ in parse_overrides(self._resolved()[1])]
        for path in DECIDES_LENGTH:
            if path in given:
                raise ConfigError(
                    f"--{path} and --time both say how long the run is; leave one of them out"
                )
        return given

    def _folder(self, asked: Config) -> Path:
        return self.run_dir or Path("runs") / asked.name

    def _asked(self, asked: Config) -> dict[str, Any]:
        """Return the values that identify the request: seconds, configuration hash and the keys
        that the user set."""
        from pentameter.config.fingerprint import NOT_THE_TRAINING, config_hash

        given = sorted(set(self._given()).difference(NOT_THE_TRAINING))
        return {"seconds": self.budget.seconds, "config": config_hash(asked), "given": given}

    def _other_run(self, folder: Path, record: Mapping[str, Any] | None) -> str:
        from pentameter.formatting import duration
        from pentameter.train.keep.resuming import NEW_FOLDER

        if record is None:
            said = "a run that was begun without --time; leave that out to continue it"
        elif record["asked"]["seconds"] != self.budget.seconds:
            asked = duration(record["asked"]["seconds"])
            said = f"a run of --time {asked}, whose length is decided; ask for that to continue it"
        else:
            said = "a run of the same --time and other settings; give those to continue it"
        return (
            f"{folder} holds {said}, or {folder}/config.toml in the place of {self.source}. For "
            f"another run, {NEW_FOLDER}"
        )

    def _write(self, folder: Path) -> None:
        from pentameter.disk.atomic import make_folder, write_atomic

        make_folder(folder)
        record = {"asked": self._asked(self._load({})), "chosen": dict(self.settings)}
        write_atomic(folder / RECORD, json.dumps(record, indent=1).encode() + b"\n")


def _read(path: Path) -> dict[str, Any] | None:
    """Return the recorded choice in the file `path`; None if it is missing. Raises CorruptError if
    it is damaged."""

    from pentameter.disk.atomic import read_own_json

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
