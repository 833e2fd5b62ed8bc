"""The verification of checkpoints: each is hashed once in a run's process, by all ranks together.

Rank 0 finds checkpoints and decides what becomes of them, and hashes none of them alone: terabytes
take one process longer than others may wait in a collective. Where it has to know whether a
checkpoint is whole, all ranks hash their shares of it.
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
"""Longest time until a network file system shows what another machine has written."""

_HASH_THREADS = 8  # of all ranks on a machine together


class _UnverifiedError(Exception):
    """Rank 0 asks whether the files at `path` match `manifest`, and has to hash them first."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path, manifest)
        self.path, self.manifest = path, manifest


class Verification:
    """The checkpoints whose files the ranks of `world` have hashed since the start, and what they
    found."""

    def __init__(self, world: World | None = None) -> None:
        self.world = World() if world is None else world
        self._found: dict[Path, tuple[bytes, CorruptError | None]] = {}

    def trust(self, path: Path, manifest: Manifest) -> None:
        """Record that the files of the checkpoint at `path` match `manifest`."""
        self._found[path.resolve()] = manifest.to_bytes(), None

    def forget(self, path: Path) -> None:
        """Have the checkpoint at `path` hashed again when it is next asked for."""
        self._found.pop(path.resolve(), None)

    def check(self, path: Path, manifest: Manifest) -> None:
        """Raise CorruptError, naming the file, unless the files at `path` match `manifest`. Their
        sizes are compared each time, their content once.

        In a world of several ranks rank 0 alone calls it, in the work that it gave to `on_main`.
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
        """Run `work` on rank 0, and return its result on every rank; an error is raised on all.
        Collective, and as patient as a disk needs.

        Where `work` calls `check` for a checkpoint that was not hashed yet, all ranks hash it, and
        then `work` begins anew: what it changes it must change after all its checks. `doing` and
        `step` are noted as the activity of all ranks.
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
        """Return one for the ranks of `world`, which shares what is known: of the default World,
        for rank 0 at work while the others wait patiently."""
        shared = Verification(world)
        shared._found = self._found
        return shared

    def _hash(self, path: Path, manifest: Manifest) -> CorruptError | None:
        """Hash this rank's share of the files, and note what the ranks have found. Collective."""
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
    """Return the files that `rank` of `n_ranks` hashes: each file has one rank, and ranks get about
    equally many bytes."""
    loads, shares = [0] * n_ranks, [list[FileRecord]() for _ in range(n_ranks)]
    for record in sorted(files, key=lambda each: (-each.n_bytes, each.name)):
        least = loads.index(min(loads))
        loads[least] += record.n_bytes
        shares[least].append(record)
    return shares[rank]


def _await_visible(path: Path, records: Sequence[FileRecord], go_on: Callable[[], None]) -> None:
    """Return once this machine sees all files, or after VISIBLE_SECONDS: rank 0 sees them."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    for record in records:
        while time.monotonic() < deadline:
            try:
                check_file(path, record, hash_content=False)
                break
            except MissingFileError:
                go_on()
                time.sleep(PAUSE_SECONDS)
