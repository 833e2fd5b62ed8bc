"""The manifest, manifest.json: every file in a checkpoint with its hash. A folder without a valid
manifest is no checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pentameter.disk.atomic import (
    MAX_JSON_BYTES,
    FileRecord,
    decode_json,
    read_regular,
    sync,
    write_hashed,
)
from pentameter.errors import CorruptError

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
MAX_STEP = 2**31 - 1  # steps are indexed by 32-bit words everywhere

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's content: the run and step that were saved, the hash of the run's
    configuration, and a record (name, size, sha256) for every file in the folder."""

    run_id: str
    step: int
    config_hash: str
    layout: Mapping[str, int]
    """Dimension of the layout (`data`, `tensor`, …) → degree of parallelism of the run that wrote
    it; 1 if absent."""
    groups: Mapping[str, tuple[str, ...]]
    """Tensor group (`model`, `optimizer`) → names of the files that hold its tensors."""
    files: tuple[FileRecord, ...]

    @property
    def n_bytes(self) -> int:
        """Size in bytes of all files, without the manifest."""
        return sum(record.n_bytes for record in self.files)

    def record(self, name: str) -> FileRecord | None:
        """Return the record (size, sha256) of the file `name`; None if the checkpoint has no such
        file."""
        return next((record for record in self.files if record.name == name), None)

    def to_bytes(self) -> bytes:
        """Encode the manifest as JSON whose `manifest_sha256` covers everything else in it."""
        return sealed_json({"format_version": FORMAT_VERSION, **asdict(self)}, "files")


def encode_json(content: Any) -> bytes:
    """Encode JSON with one spelling per content, so that equal content gives equal bytes.

    Raises ValueError for values that JSON cannot hold: NaN, infinities, foreign types.
    """
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def sealed_json(content: dict[str, Any], *parts: str) -> bytes:
    """Encode the content of a manifest as JSON, with one more key, `manifest_sha256`, the hash of
    all the rest. `parts` are the keys of `content` whose values are lists of file records; each
    list is written as an object from file name to record."""
    for part in parts:
        content[part] = {record.pop("name"): record for record in content[part]}
    content["manifest_sha256"] = hashlib.sha256(encode_json(content)).hexdigest()
    return encode_json(content)


def decode_versioned(data: bytes, where: Path | str, newest: int) -> dict[str, Any]:
    """Decode JSON that has a `format_version`. `where` is its path or URL, for messages. Raises
    CorruptError if it is malformed, or if its version is above `newest`."""
    content = decode_json(data, Path(where))
    version = content.get("format_version")
    if isinstance(version, int) and version > newest:
        raise CorruptError(
            f"{where} has format_version={version}; this version of pentameter reads up to "
            f"{newest}, so use a newer one"
        )
    return content


@contextmanager
def well_formed(where: Path | str) -> Iterator[None]:
    """Context manager for code that takes parsed JSON apart: an error within it (a missing key, a
    wrong type) is raised as CorruptError, saying that the JSON at `where`, a path or URL, is
    malformed."""
    try:
        yield
    except (
        LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError
    ) as error:  # fmt: skip
        raise CorruptError(f"{where} is malformed: {error!r}") from error


def checked_step(step: object) -> int:
    """Return the value `step` from JSON. Raises ValueError unless it is an integer in the range of
    steps."""
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise ValueError(f"step={step!r} is not a step")
    return step


def is_plain_name(name: object) -> bool:
    """Return True if `name` is a file name of letters, digits, `.`, `_` and `-`, which cannot lead
    out of its folder."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def seal(
    folder: Path,
    tensors: Mapping[str, Sequence[FileRecord]],
    small: Sequence[FileRecord],
    *,
    run_id: str,
    step: int,
    config_hash: str,
    layout: Mapping[str, int],
) -> Manifest:
    """Turn a folder whose files are written into a checkpoint: add the manifest and sync the
    folder.

    `tensors` maps each group (`model`, `optimizer`) to the records (name, size, sha256) of its
    files; `small` has the records of all other files. `run_id`, `step`, `config_hash` and `layout`
    (axis → degree of parallelism) are recorded in the manifest. It is written last, so nothing it
    names can be missing.
    """
    records = [*(record for of_group in tensors.values() for record in of_group), *small]
    groups = {group: tuple(each.name for each in files) for group, files in tensors.items()}
    manifest = Manifest(run_id, step, config_hash, dict(layout), groups, tuple(records))
    write_hashed(folder / MANIFEST_NAME, [manifest.to_bytes()])
    sync(folder)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read and verify the manifest in `folder`, whatever the folder's name; the files that it names
    are not opened. Raises CorruptError if it is missing, damaged, malformed or written by a newer
    version."""
    path = folder / MANIFEST_NAME
    data = read_regular(path, max_bytes=MAX_JSON_BYTES)
    content = decode_versioned(data, path, FORMAT_VERSION)
    with well_formed(path):
        manifest = _parse(content)
    # One spelling per content: equal bytes mean a true checksum and not one changed character.
    if manifest.to_bytes() != data:
        raise CorruptError(f"{path} is damaged: its content does not match its own checksum")
    return manifest


def parse_records(entries: Mapping[str, Any]) -> tuple[FileRecord, ...]:
    """Return the file records in a manifest's JSON: file name → object with `n_bytes` and `sha256`.
    Raises ValueError for a name that could lead out of the folder, or an impossible size or hash;
    LookupError or TypeError if a key is missing or has another type."""
    files = []
    for name, entry in entries.items():
        n_bytes, sha256 = entry["n_bytes"], entry["sha256"]
        if not is_plain_name(name):
            raise ValueError(f"file name {name!r} could lead out of the folder")
        if type(n_bytes) is not int or n_bytes < 0 or not _SHA256.fullmatch(sha256):
            raise ValueError(f"size or sha256 of {name!r} is impossible")
        files.append(FileRecord(name, n_bytes, sha256))
    return tuple(files)


def _parse(content: Mapping[str, Any]) -> Manifest:
    files = parse_records(content["files"])
    if MANIFEST_NAME in content["files"]:
        raise ValueError(f"{MANIFEST_NAME!r} cannot hold its own sha256")
    groups = {str(group): tuple(names) for group, names in content["groups"].items()}
    for group, names in groups.items():
        for name in names:
            if name not in content["files"]:
                raise ValueError(f"group {group!r} names the unknown file {name!r}")
    return Manifest(
        run_id=str(content["run_id"]),
        step=checked_step(content["step"]),
        config_hash=str(content["config_hash"]),
        layout={str(axis): int(degree) for axis, degree in content["layout"].items()},
        groups=groups,
        files=files,
    )
