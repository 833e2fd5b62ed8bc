"""A trial of the battery: the power fails, and what was not synced is lost.

While a run trains on an ordinary disk, the process follows what a disk would still have after a
power loss: of a file what it held when it was last synced and, of what was written since, an
initial part, perhaps of zeros; of folders their entries when they were last synced, and the first
few of the changes since, in their order, as journals of file systems keep it.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from trials.faults.planted import call_before
from trials.faults.trial import Trial, assert_checkpoints_whole, join

Entries = dict[str, int]
"""Name → number of a file or folder, which none had before: inode numbers are used again."""


@dataclass
class DurableFolder:
    """A folder's entries when it was last synced, and the changes since: moment → (name, number),
    where None is a removal; a rename is two of them in one."""

    entries: Entries = field(default_factory=dict)
    changes: dict[int, tuple[tuple[str, int | None], ...]] = field(default_factory=dict)


class Disk:
    """Follows the operations of this process below `root`; `lose_power` writes what is left."""

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.unused, self.moments = count(), count()
        self.numbers: dict[int, int] = {}
        """Inode → the number of what has it now."""
        self.files: dict[int, bytes] = {}
        """Number → content when last synced."""
        self.unsynced: dict[int, bytes] = {}
        """Number of a file that has gone → what it held by then."""
        self.folders: dict[int, DurableFolder] = {}
        self.lock = threading.RLock()
        for path, _, names in os.walk(self.root):
            self.folders[self.number(path)] = DurableFolder(self.entries(path))
            for name in names:
                file = os.path.join(path, name)
                self.files[self.number(file)] = Path(file).read_bytes()

    def number(self, path: str, *, is_new: bool = False) -> int:
        inode = os.stat(path).st_ino
        if is_new or inode not in self.numbers:
            self.numbers[inode] = next(self.unused)
        return self.numbers[inode]

    def entries(self, folder: str) -> Entries:
        return {name: self.number(os.path.join(folder, name)) for name in os.listdir(folder)}

    def full_path(self, path: str | os.PathLike[str], dir_fd: int | None) -> str:
        folder = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        path = os.path.join(folder, os.fspath(path))
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))

    def is_ours(self, path: str) -> bool:
        return path == self.root or path.startswith(f"{self.root}/")

    def change(self, path: str, *changes: tuple[str, int | None]) -> None:
        folder = self.folders[self.number(os.path.dirname(path))]
        folder.changes[next(self.moments)] = changes

    def added(self, path: str, *, is_folder: bool) -> None:
        """A file or folder was made, whose number may have been another one's before."""
        number = self.number(path, is_new=True)
        if is_folder:
            self.folders[number] = DurableFolder()
        else:
            self.files[number] = b""
        self.change(path, (os.path.basename(path), number))

    def removed(self, path: str) -> None:
        """A file or folder is about to be removed."""
        self.keep(path)
        self.change(path, (os.path.basename(path), None))

    def keep(self, path: str) -> None:
        if os.path.isfile(path):
            self.unsynced[self.number(path)] = Path(path).read_bytes()

    def renamed(self, source: str, target: str) -> None:
        """`source` is about to get the name `target`, of the same folder."""
        assert os.path.dirname(source) == os.path.dirname(target)
        if os.path.lexists(target):
            self.keep(target)
        moved = os.path.basename(target), self.number(source)
        self.change(target, (os.path.basename(source), None), moved)

    def synced(self, fd: int) -> None:
        """A file or folder is about to be synced."""
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not self.is_ours(path):
            return
        if os.path.isdir(path):
            self.folders[self.number(path)] = DurableFolder(self.entries(path))
        else:
            self.files[self.number(path)] = Path(path).read_bytes()

    def lose_power(self, target: Path, draw: random.Random) -> None:
        """Write what the disk has after a power loss now into the new folder `target`."""
        now = {}
        for path, _, names in os.walk(self.root):
            for name in names:
                file = os.path.join(path, name)
                now[self.number(file)] = Path(file).read_bytes()
        moments = [moment for each in self.folders.values() for moment in each.changes]
        last = draw.choice([-1, *moments])
        self._write(self.number(self.root), target, last, draw, {**self.unsynced, **now})

    def _write(
        self, number: int, target: Path, last: int, draw: random.Random, now: dict[int, bytes]
    ) -> None:
        folder = self.folders[number]
        entries = dict(folder.entries)
        for moment, changes in folder.changes.items():
            for name, child in changes if moment <= last else ():
                entries.pop(name, None)
                if child is not None:
                    entries[name] = child
        target.mkdir()
        for name, child in entries.items():
            if child in self.folders:
                self._write(child, target / name, last, draw, now)
            else:
                synced, latest = self.files.get(child, b""), now.get(child, b"")
                n_bytes = draw.randint(min(len(synced), len(latest)), len(latest))
                kept = latest[:n_bytes] if latest.startswith(synced) else synced
                if draw.random() < 0.3:  # the length was noted, the content was not
                    kept = synced + bytes(max(0, len(kept) - len(synced)))
                (target / name).write_bytes(kept)


@dataclass(frozen=True)
class PowerLoss:
    """The power fails before the n-th file-system operation since the plan of the `save`-th
    checkpoint; what is left of `root` is in the new folder `after`."""

    root: Path
    after: Path
    save: int
    n: int
    seed: int

    def __call__(self) -> None:
        disk, draw = Disk(self.root), random.Random(self.seed)
        n_left: int | None = None

        def arm() -> None:
            nonlocal n_left
            n_left = self.n

        def operation() -> None:
            nonlocal n_left
            if n_left is not None:
                n_left -= 1
                if n_left == 0:
                    disk.lose_power(self.after, draw)
                    os.kill(os.getpid(), signal.SIGKILL)

        _follow(disk, operation)
        call_before("plan of a save", self.save, arm)


def _follow(disk: Disk, before: Callable[[], None]) -> None:
    """Have `disk` follow this process's operations; `before` is called before each."""
    real_open, real_fsync, real_mkdir = os.open, os.fsync, os.mkdir

    def open_(path, flags, mode=0o777, *, dir_fd=None):
        full = disk.full_path(path, dir_fd)
        with disk.lock:
            is_new = flags & os.O_CREAT and disk.is_ours(full) and not os.path.lexists(full)
            if is_new:
                before()
            fd = real_open(path, flags, mode, dir_fd=dir_fd)
            if is_new:
                disk.added(full, is_folder=False)
            return fd

    def fsync(fd):
        with disk.lock:
            before()
            real_fsync(fd)
            disk.synced(fd)

    def mkdir(path, mode=0o777, *, dir_fd=None):
        full = disk.full_path(path, dir_fd)
        with disk.lock:
            before()
            real_mkdir(path, mode, dir_fd=dir_fd)
            if disk.is_ours(full):
                disk.added(full, is_folder=True)

    def renaming(real):
        def rename(source, target, **options):
            paths = [disk.full_path(path, None) for path in (source, target)]
            with disk.lock:
                before()
                if disk.is_ours(paths[0]):
                    disk.renamed(*paths)
                real(source, target, **options)

        return rename

    def removing(real):
        def remove(path, *, dir_fd=None):
            full = disk.full_path(path, dir_fd)
            with disk.lock:
                before()
                if disk.is_ours(full) and os.path.lexists(full):
                    disk.removed(full)
                real(path, dir_fd=dir_fd)

        return remove

    def write(real):
        def wrapped(fd, data):
            with disk.lock:
                before()
                return real(fd, data)

        return wrapped

    os.open, os.fsync, os.mkdir, os.write = open_, fsync, mkdir, write(os.write)
    os.rename, os.replace = renaming(os.rename), renaming(os.replace)
    os.unlink, os.rmdir = removing(os.unlink), removing(os.rmdir)


def a_power_loss(trial: Trial) -> str:
    """The power fails in or after a save; the run goes on from what the disk has then."""
    beside = trial.number % 2 == 0
    whole = trial.undisturbed(**{"checkpoint.asynchronous": beside})
    root, after = trial.folder / "disk", trial.folder / "after"
    root.mkdir()
    inside = Trial(trial.number, trial.draw, root, trial.shared, trial.mistakes)
    save, n = trial.draw.randint(1, 8), trial.draw.randint(1, 60)
    fault = PowerLoss(root, after, save, n, trial.draw.getrandbits(32))
    codes = join(inside.start(whole.config, planted=[fault]))
    assert codes[0] in (-signal.SIGKILL, 0), codes
    if codes[0]:
        shutil.rmtree(root)
        after.rename(root)
    if inside.run.exists():
        assert_checkpoints_whole(inside.run)
    inside.finish(whole)
    return (
        f"save {save}, operation {n}, {'beside training' if beside else 'waited for'}: {codes[0]}"
    )
