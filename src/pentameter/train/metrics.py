"""metrics.jsonl: one JSON object a line, `event` first, continued without gap or repeat."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentameter.checkpoint.files import storage_errors, write_atomic


class MetricsLog:
    """Appends events to a file. Each line is complete on disk or is cut off at the next start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors(path, "write"):
            self._file = path.open("ab")

    def write(self, event: str, **values: Any) -> None:
        """Append one event. Non-finite numbers become null, which every JSON reader accepts."""
        with storage_errors(self.path, "write"):
            self._file.write(_line(event, values))
            self._file.flush()

    def sync(self) -> int:
        """Bytes written so far, all of them safely on disk."""
        with storage_errors(self.path, "write"):
            self._file.flush()
            os.fsync(self._file.fileno())
            return self.path.stat().st_size

    def close(self) -> None:
        """Close the file; writing afterwards is an error."""
        self._file.close()


def rewind_metrics(path: Path, *, n_bytes: int, checkpoint: Mapping[str, Any] | None) -> None:
    """Cut `path` back to a checkpoint: what was there when it was saved, and its own event.

    `n_bytes` is the file's size just before the checkpoint was written. Lines after it come from
    steps that are about to be run again, except the one that says the checkpoint was saved; a
    kill may have prevented that line, so `checkpoint` holds its values. None goes back to the
    start of the run.
    """
    if not path.exists():
        return
    raw = path.read_bytes()
    kept = raw[:n_bytes]
    kept = kept[: kept.rfind(b"\n") + 1]  # a half-written last line is not an event
    if checkpoint is not None and not _find_checkpoint(kept, checkpoint["step"]):
        # A checkpoint that was saved again has its line in what is kept.
        kept += _find_checkpoint(raw[len(kept) :], checkpoint["step"]) or _line(
            "checkpoint", checkpoint
        )
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


def _line(event: str, values: Mapping[str, Any]) -> bytes:
    record = {"event": event, **{key: _jsonable(value) for key, value in values.items()}}
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value
