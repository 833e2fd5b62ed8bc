"""The identity of a run, from its plan.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentameter.disk.atomic import read_own_json
from pentameter.errors import CorruptError, StorageError


@dataclass(frozen=True)
class RunIdentity:
    """The identity of the run in a folder, and the weights that it began with. A frozen record."""

    run_id: str
    parent: Mapping[str, Any] | None = None
    """The run (`run_id`) and `step` from which it branched off; None if it did not."""
    init_from: Mapping[str, Any] | None = None
    """The model whose weights it began with; None for random weights."""


def read_identity(path: Path) -> RunIdentity | None:
    """Read the identity of the run in the folder `path` from plan.json; None if there is no run,
    which config.toml marks. Raises CorruptError if plan.json is missing or damaged."""
    if not (path / "config.toml").exists():
        return None
    try:
        record = read_own_json(path / "plan.json")
        run_id, parent, origin = (record.get(key) for key in ("run_id", "parent", "init_from"))
        if not isinstance(run_id, str):
            raise TypeError("run_id is not a text")
        if not isinstance(parent, Mapping | None) or not isinstance(origin, Mapping | None):
            raise TypeError("parent or init_from is not an object")
        return RunIdentity(run_id, parent, None if origin is None else _origin(origin))
    except (CorruptError, StorageError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(
            f"{path / 'plan.json'} is missing or damaged, so the run's checkpoints cannot be "
            "recognised; continue in a new folder with --run-dir NEW --resume "
            f"{path}/checkpoints/step-…"
        ) from error


def _origin(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return what plan.json's `init_from` records of the model whose weights a run began with: the
    texts that every version of this program writes, and of the other values those that are
    there."""
    texts = ("path", "identity", *(("base_model",) if "base_model" in origin else ()))
    counts = [key for key in ("step", "tokens") if type(origin.get(key)) is int]
    return {key: str(origin[key]) for key in texts} | {key: origin[key] for key in counts}


def shards_read(path: Path) -> list[str]:
    """Return the names of the folders of token shards that the run in `path` has read. Empty if
    there is no run, or if plan.json, which records them, is damaged."""
    try:
        record = read_own_json(path / "plan.json")
    except (CorruptError, StorageError):
        return []
    match record.get("data"):
        case {"shards": list(folders)}:
            return [Path(str(folder)).name for folder in folders]
    return []
