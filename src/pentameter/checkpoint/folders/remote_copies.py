"""Copies of a run's checkpoints in an object store (`checkpoint.copy_to`).

    PREFIX/run.json                      the run, the process that copies, the steps that are copied
    PREFIX/step-00000500/manifest.json   the copy's manifest
    PREFIX/step-00000500/UUID/…          its files: the checkpoint's, and below run/ the run's own

As in a run folder, only files that a manifest names exist, and the manifest is written last. But an
object store has no rename and no lock, its listing may be outdated, and an object may be replaced
while it is read. So the files of each copy are below a prefix of their own (UUID) and never written
again. Writing the manifest, a single object, makes a copy appear or replaces the one of its step.
Copies are found by the names in run.json as well as by a listing.

Only one process should copy: one that finds another's name in run.json stops. If it notices too
late, it makes one copy more, and that copy is complete nevertheless.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from pentameter.checkpoint.folders.opening import read_own_manifest
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    checked_step,
    decode_versioned,
    encode_json,
    parse_records,
    sealed_json,
    well_formed,
)
from pentameter.disk.atomic import MAX_JSON_BYTES, FileRecord, check_hash, write_hashed
from pentameter.disk.owner import Owner, current_owner
from pentameter.disk.remote_folder import RemoteFolder
from pentameter.errors import ConfigError, CorruptError, PentameterError, StorageError
from pentameter.record.checkpoints import step_folder_name

RUN_NAME = "run.json"
FORMAT_VERSION = 1
READINGS = 3
"""Number of times that an object is read before its content counts as damaged."""

_MANIFEST = re.compile(r"step-(\d{8,10})/manifest\.json")
_FILE = re.compile(r"step-(\d{8,10})/([0-9a-f]{32})/.+")
_TEMPORARY = re.compile(r"(?:step-\d{8,10}/)?(?:run|manifest)\.json\.tmp-[0-9a-f]{32}")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Copy:
    """A copy of a checkpoint, as its manifest describes it. The copy exists once that manifest is
    written."""

    run_id: str
    step: int
    folder: str
    """The UUID, 32 hexadecimal digits, below whose prefix the copy's files are."""
    checkpoint: tuple[FileRecord, ...]
    """The checkpoint's files, its own manifest among them."""
    run: tuple[FileRecord, ...]
    """The run's files below `run/`, as they were when the copy was made."""
    needs: tuple[int, ...]
    """Steps of earlier checkpoints that a run resumed from this one may have to return to."""

    @property
    def n_bytes(self) -> int:
        """Size in bytes of all its files."""
        return sum(record.n_bytes for record in (*self.checkpoint, *self.run))

    @property
    def prefix(self) -> str:
        """Prefix of the names of this copy's objects."""
        return f"{step_folder_name(self.step)}/{self.folder}"

    @property
    def names(self) -> list[str]:
        """The names of all objects of this copy except its manifest."""
        checkpoint = [f"{self.prefix}/{record.name}" for record in self.checkpoint]
        return [*checkpoint, *(f"{self.prefix}/run/{record.name}" for record in self.run)]

    def to_bytes(self) -> bytes:
        """Encode the manifest as JSON whose `manifest_sha256` covers everything else in it."""
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        return sealed_json(content, "checkpoint", "run")


def parse_copy(data: bytes, where: str, step: int) -> Copy:
    """Read a copy's manifest, found at `where` for `step`. Raises CorruptError if it is damaged,
    malformed, of another step or written by a newer version."""
    content = decode_versioned(data, where, FORMAT_VERSION)
    with well_formed(where):
        copy = Copy(
            run_id=str(content["run_id"]),
            step=checked_step(content["step"]),
            folder=uuid.UUID(content["folder"]).hex,
            checkpoint=parse_records(content["checkpoint"]),
            run=parse_records(content["run"]),
            needs=tuple(map(checked_step, content["needs"])),
        )
    if copy.to_bytes() != data or copy.step != step:
        raise CorruptError(f"{where} is damaged: its content does not match its own checksum")
    return copy


@dataclass(frozen=True)
class _Claim:
    """The content of run.json in an object store: which run has its copies there, and which process
    alone may write them now."""

    run_id: str
    owner: Owner | None
    """The process that copies; None if the file does not say."""
    steps: tuple[int, ...]
    """Steps of which there is a copy."""
    coming: int | None = None
    """Step of the copy that is being published, whose manifest may or may not be written yet; None
    if there is none."""

    def to_bytes(self) -> bytes:
        """Return the content of run.json."""
        return encode_json({"format_version": FORMAT_VERSION, **asdict(self)})


def _parse_claim(data: bytes, where: str) -> _Claim:
    content = decode_versioned(data, where, FORMAT_VERSION)
    with well_formed(where):
        coming, owner = content["coming"], content["owner"]
        claim = _Claim(
            run_id=str(content["run_id"]),
            owner=None if owner is None else Owner(**owner),
            steps=tuple(map(checked_step, content["steps"])),
            coming=None if coming is None else checked_step(coming),
        )
    return claim


class _Upload:
    """The objects that were written so far for one copy of a checkpoint; all their names begin with
    `prefix`. If the copy fails, `take_back` removes them."""

    def __init__(self, folder: RemoteFolder, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix
        self._names: list[str] = []

    def put_file(self, path: Path, record: FileRecord) -> None:
        """Write the file `record.name` of the checkpoint in the folder `path` (see
        `RemoteFolder.put_file`)."""
        self._names.append(f"{self._prefix}/{record.name}")
        self._folder.put_file(self._names[-1], path / record.name, record)

    def put(self, name: str, content: bytes) -> FileRecord:
        """Write an object with this content (see `RemoteFolder.put`)."""
        self._names.append(f"{self._prefix}/{name}")
        return self._folder.put(self._names[-1], content)

    def take_back(self) -> bool:
        """Remove all objects written so far, each tried once; return False if one of them could not
        be removed."""
        try:
            for name in self._names:
                self._folder.remove(name, pauses=())
        except PentameterError:
            return False
        return True


class RemoteCopies:
    """The copies of one run's checkpoints in the object store `folder`. Only one process at a time
    may write there. `warnings` gets a line for each damaged copy."""

    def __init__(self, folder: RemoteFolder, warnings: list[str]) -> None:
        self.folder, self._warnings = folder, warnings
        self.run_id: str | None = None
        """The run whose checkpoints are copied; None before `read`, or if there is no copy yet."""
        self.copies: dict[int, Copy] = {}
        """Step → its copy, as last read or written by this process."""
        self._unread: set[int] = set()  # steps whose manifest is there, and damaged
        self._me = current_owner()
        self._before: Owner | None = None  # who copied before us, as run.json said
        self.is_read = False
        """True once `read` has found out which copies exist."""
        self._is_ours = self._is_clean = False

    def read(self) -> None:
        """Find the existing copies, by the names in run.json and by a listing, and keep them in
        `copies`.

        Raises StorageError if the store does not answer, or if run.json names copies and none of
        them is found (a run must not start from nothing then); ConfigError for copies of several
        runs; CorruptError if all copies that run.json names are damaged.
        """
        claim = None
        try:
            claim = self._claim()
        except CorruptError as error:
            self._warnings.append(f"{error}; the copies beside it are looked for by a listing")
        steps = {int(found[1]) for found in map(_MANIFEST.fullmatch, self.folder.names()) if found}
        if claim is not None:
            steps |= {*claim.steps, *([] if claim.coming is None else [claim.coming])}
        self.copies, damage = {}, []
        self._unread.clear()
        for step in sorted(steps):
            try:
                copy = self._find(step)
            except CorruptError as error:
                damage.append(error)
                self._unread.add(step)
            else:
                self.copies |= {} if copy is None else {step: copy}
        if claim is not None and claim.steps and not self.copies:
            if damage:
                raise CorruptError(f"every copy in {self.folder} is damaged; newest: {damage[-1]}")
            raise StorageError(
                f"{self.folder}/{RUN_NAME} names copies of step {claim.steps[-1]} and others, and "
                "none is there; try again later, or give another checkpoint.copy_to"
            )
        self._warnings += [f"passed over a copy: {error}" for error in damage]
        run_ids = {copy.run_id for copy in self.copies.values()}
        run_ids |= set() if claim is None or not claim.steps else {claim.run_id}
        if len(run_ids) > 1:
            raise ConfigError(
                f"{self.folder} mixes copies of the runs {', '.join(sorted(run_ids))}; move those "
                "of one away, or give another checkpoint.copy_to"
            )
        self.run_id = next(iter(run_ids), None)
        self._before = None if claim is None else claim.owner
        self.is_read = True

    def claim(self, run_id: str) -> None:
        """Become the process that alone copies checkpoints to this store, by writing that into
        run.json. Raises ConfigError if the store holds copies of another run than `run_id`,
        StorageError if nothing can be written."""
        if not self.is_read:
            self.read()
        if self.run_id not in (None, run_id):
            raise ConfigError(
                f"{self.folder} holds copies of run {self.run_id}, and this is run {run_id}; give "
                "another checkpoint.copy_to"
            )
        self.run_id = run_id
        self._write_claim()
        self._is_ours = True

    def add(
        self,
        path: Path,
        run_files: Callable[[], Mapping[str, bytes]],
        *,
        run_id: str,
        needs: Collection[int],
        keep_last: int,
    ) -> int:
        """Copy the checkpoint in the folder `path`, then remove older copies. Return the size of
        the copy in bytes, or 0 if that checkpoint was copied before.

        run_files: returns the run's own files, name → content, when called. needs: steps of earlier
        checkpoints that a run resumed from this one may have to return to. keep_last: number of
        newest copies to keep; copies that these need are kept, too.

        On return every object has been read back and matches its record. Raises StorageError once
        the attempts are used up, CorruptError if the checkpoint itself is damaged; earlier copies
        then still exist.
        """
        if not self._is_ours:
            self.claim(run_id)
        manifest = read_own_manifest(path)
        content, own = manifest.to_bytes(), _own_record(manifest)
        before = self.copies.get(manifest.step)
        self._clean_once()
        if before is not None and own in before.checkpoint:
            return 0
        copy = Copy(run_id, manifest.step, uuid.uuid4().hex, (*manifest.files, own), (), ())
        upload = _Upload(self.folder, copy.prefix)
        try:
            for record in manifest.files:
                upload.put_file(path, record)
            upload.put(MANIFEST_NAME, content)
            files = {name: data for name, data in run_files().items() if data}
            run = [upload.put(f"run/{name}", data) for name, data in files.items()]
            known = [step for step in needs if step in self.copies and step != copy.step]
            copy = replace(copy, run=tuple(run), needs=tuple(known))
            self._publish(copy)
        except Exception:
            # A manifest may be there though the store said that it was not written.
            is_named = copy.step in self._unread or self.copies.get(copy.step) is copy
            self._is_clean = is_named or upload.take_back()
            raise
        if before is not None:
            self._remove_files(before)
        self._prune(copy.step, keep_last)
        return copy.n_bytes

    def discard_after(self, step: int) -> None:
        """Remove the copies of steps after `step`. If the store has no copy up to `step`, remove
        none, so that one is left."""
        if all(each > step for each in self.copies):
            return
        for later in [each for each in self.copies if each > step]:
            self._remove(later)
        self._write_claim()

    def _find(self, step: int) -> Copy | None:
        name = f"{step_folder_name(step)}/{MANIFEST_NAME}"

        def read() -> Copy | None:
            data = self.folder.get(name, MAX_JSON_BYTES)
            return None if data is None else parse_copy(data, f"{self.folder}/{name}", step)

        return _repeated(read)

    def _claim(self) -> _Claim | None:
        def read() -> _Claim | None:
            data = self.folder.get(RUN_NAME, MAX_JSON_BYTES)
            return None if data is None else _parse_claim(data, f"{self.folder}/{RUN_NAME}")

        return _repeated(read)

    def _write_claim(self, coming: int | None = None) -> None:
        assert self.run_id is not None  # claimed
        claim = _Claim(self.run_id, self._me, tuple(sorted(self.copies)), coming)
        self.folder.put(RUN_NAME, claim.to_bytes())

    def _refuse_other_owner(self) -> None:
        """Raise StorageError if another process has written itself into run.json since this one
        did, to copy in its place. If run.json names the process that was there before this one,
        that is no error: the store may have returned an outdated content."""
        with suppress(CorruptError):
            claim = self._claim()
            if claim is not None and claim.owner not in (None, self._me, self._before):
                self._is_ours = False
                raise StorageError(
                    f"{claim.owner} copies run {claim.run_id} to {self.folder} now, so this "
                    "process does not; end one of the two"
                )

    def _publish(self, copy: Copy) -> None:
        """Write the manifest of `copy`, whose files are all written: from then on the copy
        exists."""
        self._refuse_other_owner()
        self._write_claim(coming=copy.step)
        self._unread.add(copy.step)  # until it is known whether the manifest was written
        self.folder.put(f"{step_folder_name(copy.step)}/{MANIFEST_NAME}", copy.to_bytes())
        self._unread.discard(copy.step)
        self.copies[copy.step] = copy
        self._write_claim()

    def _clean_once(self) -> None:
        """Remove what interrupted copies and removals have left in the store: the listed objects
        that belong to no copy. Done once, before the first write."""
        if not self._is_clean:
            for name in self.folder.names():
                if _is_left(name, self.copies, self._unread):
                    self.folder.remove(name)
            self._is_clean = True

    def _prune(self, step: int, keep_last: int) -> None:
        """Remove the copies of steps before `step`, except the `keep_last` newest of all and those
        that these need."""
        newest = sorted(self.copies, reverse=True)[: max(1, keep_last)]
        kept = {*newest, *(need for each in newest for need in self.copies[each].needs)}
        old = [each for each in self.copies if each < step and each not in kept]
        for each in old:
            self._remove(each)
        if old:
            self._write_claim()

    def _remove(self, step: int) -> None:
        """Remove the copy of `step`: its manifest first, so that readers never find a partial
        copy."""
        self.folder.remove(f"{step_folder_name(step)}/{MANIFEST_NAME}")
        self._remove_files(self.copies.pop(step))

    def _remove_files(self, copy: Copy) -> None:
        for name in copy.names:
            self.folder.remove(name)


def fetch_checkpoint(
    folder: RemoteFolder, copy: Copy, store: CheckpointStore, progress: Callable[[int], object]
) -> None:
    """Download a checkpoint from its `copy` in the object store `folder` into `store`, unless the
    store has the same one. `progress` is called with the size in bytes of each block that arrives.
    Raises CorruptError if an object is missing or does not match its record."""
    with suppress(CorruptError):
        there = store.at(copy.step)
        if there is not None and _own_record(there.manifest) in copy.checkpoint:
            return

    def write(path: Path, record: FileRecord) -> None:
        name = f"{copy.prefix}/{record.name}"
        path.unlink(missing_ok=True)  # what had arrived wrong
        written = write_hashed(path, _counted(folder.blocks(name, record.n_bytes), progress))
        check_hash(f"{folder}/{name}", record, written.sha256)

    def fill(temporary: Path) -> None:
        for record in copy.checkpoint:
            _repeated(partial(write, temporary / record.name, record))

    store.receive(copy.step, fill)


def read_run_file(folder: RemoteFolder, copy: Copy, name: str) -> bytes:
    """Return the content of the run's file `name` at the time of the copy; empty if the copy has no
    such file. Raises CorruptError if the object is missing or does not match its record."""
    record = next((each for each in copy.run if each.name == name), None)
    if record is None:
        return b""
    at = f"{copy.prefix}/run/{name}"

    def read() -> bytes:
        content = b"".join(folder.blocks(at, record.n_bytes))
        check_hash(f"{folder}/{at}", record, hashlib.sha256(content).hexdigest())
        return content

    return _repeated(read)


def _repeated(read: Callable[[], Result]) -> Result:
    """Return the result of `read`. While it raises CorruptError it is called again, up to READINGS
    times in all: an object may be intact in the store and damaged on the way."""
    for _ in range(READINGS - 1):
        with suppress(CorruptError):
            return read()
    return read()


def _is_left(name: str, copies: Mapping[int, Copy], unread: Collection[int]) -> bool:
    """Return True if the object `name` is left over from an interrupted copy: its name has the form
    of a copy's object, and none of `copies` (step → copy) uses it. Objects of the steps in
    `unread`, whose manifest could not be read, do not count as left over."""
    match = _FILE.fullmatch(name)
    if match is None or int(match[1]) in unread:
        return _TEMPORARY.fullmatch(name) is not None
    copy = copies.get(int(match[1]))
    return copy is None or copy.folder != match[2]


def _own_record(manifest: Manifest) -> FileRecord:
    """Return the record (name, size, sha256) of the manifest file itself, which the manifest cannot
    list."""
    return FileRecord.of(MANIFEST_NAME, manifest.to_bytes())


def _counted(chunks: Iterable[bytes], progress: Callable[[int], object]) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        progress(len(chunk))
