"""Verification of checkpoints in a run of several ranks: each checkpoint is hashed once per
process, by all ranks together.

Rank 0 finds checkpoints and decides about them. If it hashed terabytes alone, the other ranks would
wait in a collective for longer than a collective may take. So when it needs to know whether a
checkpoint is intact, every rank hashes some of its files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pentameter.checkpoint.format.manifest import Manifest
from pentameter.disk.atomic import FileRecord, MissingFileError, check_file, check_files
from pentameter.errors import CorruptError
from pentameter.processes.group.world import PAUSE_SECONDS, World

Result = TypeVar("Result")

VISIBLE_SECONDS = 30.0
"""Longest wait until files that another machine wrote appear on a network file system."""

_HASH_THREADS = 8  # of all ranks on a machine together


class _UnverifiedError(Exception):
    """Raised by `check` on rank 0 to interrupt the work in `on_main`: all ranks must first hash the
    files of the checkpoint at `path`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path, manifest)
        self.path, self.manifest = path, manifest


class Verification:
    """Verifies checkpoints by hashing their files, the work distributed over all ranks of `world`,
    and keeps the results, so that each checkpoint is hashed once."""

    def __init__(self, world: World | None = None) -> None:
        self.world = World() if world is None else world
        self._found: dict[Path, tuple[bytes, CorruptError | None]] = {}

    def trust(self, path: Path, manifest: Manifest) -> None:
        """Record that the files of the checkpoint at `path` match `manifest`."""
        self._found[path.resolve()] = manifest.to_bytes(), None

    def forget(self, path: Path) -> None:
        """Forget the result for the checkpoint at `path`, so that the next `check` hashes it
        again."""
        self._found.pop(path.resolve(), None)

    def check(self, path: Path, manifest: Manifest) -> None:
        """Raise CorruptError, naming the file, unless the files at `path` match `manifest`. Their
        sizes are compared at each call, their content only at the first.

        With several ranks, call it on rank 0 only, within the work that `on_main` runs.
        """
        check_files(path, manifest.files, hash_content=False)
        content, damage = self._found.get(path.resolve(), (b"", None))
        if content != manifest.to_bytes():
            if self.world.size > 1:
                raise _UnverifiedError(path, manifest)
            damage = self._hash(path, manifest)
        if damage is not None:
            raise damage

    def on_main(self, work: Callable[[], Result], doing: str, step: int = 0) -> Result:
        """Run `work` on rank 0 and return its result on every rank; an error is raised on every
        rank. Collective; the other ranks wait without a time limit that a slow disk could exceed.

        When `work` calls `check` for a checkpoint that is not hashed yet, all ranks hash it and
        `work` is started again from its beginning. So `work` must make all its checks before it
        changes anything. `doing` and `step` are shown as the activity of all ranks.
        """

        def attempt() -> tuple[Result | None, tuple[Path, Manifest] | None]:
            try:
                return work(), None
            except _UnverifiedError as asked:
                return None, (asked.path, asked.manifest)

        while True:
            result, asked = self.world.patiently_on_main(attempt, doing, step)
            if asked is None:
                return result  # type: ignore[return-value]
            self._hash(*asked)

    def among(self, world: World) -> Verification:
        """Return a Verification for the ranks of another `world`, with the results known so far.
        With the default World, of one process, rank 0 can verify alone while the others wait."""
        shared = Verification(world)
        shared._found = self._found
        return shared

    def _hash(self, path: Path, manifest: Manifest) -> CorruptError | None:
        """Hash the files of the checkpoint at `path` on all ranks, each its part of them. Record
        the result and return it: the error for the first damaged file, None if all match
        `manifest`. Collective."""
        world = self.world
        records = hashed_by(manifest.files, world.rank, world.size)
        n_threads = max(1, _HASH_THREADS // world.local_size)

        def work(go_on: Callable[[], None]) -> CorruptError | None:
            try:
                if world.size > 1:
                    _await_visible(path, records, go_on)
                check_files(path, records, n_threads=n_threads, go_on=go_on)
            except CorruptError as error:
                return error
            return None

        by_rank = world.patiently(work, "verifying", manifest.step)
        damage = next((each for each in by_rank if each is not None), None)
        self._found[path.resolve()] = manifest.to_bytes(), damage
        return damage


def hashed_by(files: Sequence[FileRecord], rank: int, n_ranks: int) -> list[FileRecord]:
    """Return the files that `rank` hashes. Each file goes to one of the `n_ranks` ranks, so that
    all get about equally many bytes."""
    loads, shares = [0] * n_ranks, [list[FileRecord]() for _ in range(n_ranks)]
    for record in sorted(files, key=lambda each: (-each.n_bytes, each.name)):
        least = loads.index(min(loads))
        loads[least] += record.n_bytes
        shares[least].append(record)
    return shares[rank]


def _await_visible(path: Path, records: Sequence[FileRecord], go_on: Callable[[], None]) -> None:
    """Wait until this machine sees all files in `records`, at most VISIBLE_SECONDS. Rank 0 sees
    them already; a network file system may show them later here. `go_on` is called while
    waiting."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    for record in records:
        while time.monotonic() < deadline:
            try:
                check_file(path, record, hash_content=False)
                break
            except MissingFileError:
                go_on()
                time.sleep(PAUSE_SECONDS)
