"""metrics.jsonl: one JSON object a line, `event` first, continued without gap or repeat."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pentameter.disk.atomic import storage_errors, write_atomic
from pentameter.train.log_file import LogFile


class MetricsLog:
    """Appends events to a file; what the disk refuses is kept and written later, with a warning."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._file = LogFile(path, warn)

    def write(self, event: str, **values: Any) -> None:
        """Append one event. Non-finite numbers become null, which every JSON reader accepts."""
        self._file.append(_line(event, values))

    def sync(self) -> dict[str, Any]:
        """The record of the log in a checkpoint, for `rewind_metrics`: `metrics_bytes` of whole
        lines in the file, and `metrics_unwritten`, the lines that still wait for the disk."""
        n_bytes = self._file.sync()
        unwritten = [line.decode().rstrip("\n") for line in self._file.unwritten]
        return {"metrics_bytes": n_bytes, "metrics_unwritten": unwritten}

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def rewind_metrics(
    path: Path,
    *,
    n_bytes: int,
    unwritten: Sequence[str] = (),
    checkpoint: Mapping[str, Any] | None,
) -> None:
    """Cut `path` back to a checkpoint: what was there when it was saved, and its own event.

    `n_bytes` is the file's size just before the checkpoint was written, `unwritten` the lines that
    waited for the disk then. Lines after it come from steps that are about to be run again, except
    the one that says the checkpoint was saved; a kill may have prevented that line, so `checkpoint`
    holds its values. None goes back to the start of the run.
    """
    if not path.exists() and not unwritten:
        return
    raw = path.read_bytes() if path.exists() else b""
    kept = raw[:n_bytes]
    kept = kept[: kept.rfind(b"\n") + 1]  # a half-written last line is not an event
    rest = raw[len(kept) :]
    kept += "".join(f"{line}\n" for line in unwritten).encode()
    if checkpoint is not None and not _find_checkpoint(kept, checkpoint["step"]):
        # A checkpoint that was saved again has its line in what is kept.
        line = _find_checkpoint(rest, checkpoint["step"])
        kept += line or f"{_line('checkpoint', checkpoint)}\n".encode()
    if raw.startswith(kept):  # needs no room on a full disk
        with storage_errors(path, "write"):
            os.truncate(path, len(kept))
    else:
        write_atomic(path, kept)


def checkpoint_event(step: int, path: Path, n_bytes: int, seconds: float | None) -> dict[str, Any]:
    """The values of a `checkpoint` line; the path is relative to the run folder, which may move."""
    return {"step": step, "path": f"checkpoints/{path.name}", "bytes": n_bytes, "seconds": seconds}


def _find_checkpoint(lines: bytes, step: int) -> bytes | None:
    """The complete line that says `step` was saved."""
    for line in lines.splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            is_event = record.get("event") == "checkpoint" and record.get("step") == step
            if is_event and line.endswith(b"\n"):
                return line
    return None


def _line(event: str, values: Mapping[str, Any]) -> str:
    record = {"event": event, **{key: _jsonable(value) for key, value in values.items()}}
    return json.dumps(record, ensure_ascii=False)


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value
