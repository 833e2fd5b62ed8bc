"""The folders of a run's checkpoints by their names: which steps are there, and the newest."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pentameter.disk.atomic import storage_errors
from pentameter.errors import StorageError

REPLACED = ".replaced"
_STEP_FOLDER = re.compile(r"step-(\d{8,})(\.replaced)?")


def step_folder_name(step: int) -> str:
    """Return the name for the folder of a checkpoint at `step`: `step-00000500`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a complete checkpoint from its folder's name: `step-` with eight digits or
    more, also with the suffix `.replaced`. None for any other name."""
    match = _STEP_FOLDER.fullmatch(name)
    return None if match is None else int(match[1])


@dataclass(frozen=True)
class Candidate:
    """A folder named like a checkpoint; its content has not been read."""

    step: int
    replaced: bool
    """True if its name ends with `.replaced`. A checkpoint is renamed so while a new save at its
    step commits; it is restored if that commit never finished."""
    path: Path


def list_checkpoints(folder: Path) -> list[Candidate]:
    """Return the folders named like checkpoints, highest step first. At one step, the plain name
    comes before `.replaced`. Empty if `folder` does not exist."""
    found = []
    with storage_errors(folder, "list"), suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            match = _STEP_FOLDER.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                found.append(Candidate(int(match[1]), match[2] is not None, folder / entry.name))
    return sorted(found, key=lambda candidate: (-candidate.step, candidate.replaced))


def newest_checkpoint(run: Path) -> str:
    """Return the name of the newest checkpoint's folder in a run folder; "" if there is none or the
    folder cannot be read. Only names are looked at; `find_checkpoint` also verifies the content."""
    with suppress(StorageError):
        found = (each for each in list_checkpoints(run / "checkpoints") if not each.replaced)
        return next((each.path.name for each in found), "")
    return ""
