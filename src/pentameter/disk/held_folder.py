"""A folder that stays the one it was: after an unmount, an empty mount point has its name, and
whatever makes folders as it needs them would begin anew there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pentameter.errors import StorageError


@dataclass(frozen=True)
class HeldFolder:
    """The folder that was at `path` when a run opened it, by device and inode; `check` tells later
    whether the path still leads to it. A frozen record."""

    path: Path
    device: int
    inode: int

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return the folder that is at `path` now. Raises OSError if there is none."""
        found = os.stat(path)
        return cls(path, found.st_dev, found.st_ino)

    def check(self, holds: Callable[[], bool]) -> None:
        """Raise StorageError unless `path` still leads to this folder: it has the same device and
        inode, or else `holds()` is True. `holds` looks for something that only this folder has, as
        a disk that is mounted again may get another device number; an OSError in it counts as
        False."""
        for is_this in (lambda: self.at(self.path) == self, holds):
            with suppress(OSError):
                if is_this():
                    return
        reason = "it is not the folder that this run has opened, which is not there any more"
        error = FileNotFoundError(errno.ENOENT, f"{reason}; was its disk unmounted?")
        raise StorageError(
            f"cannot write to {self.path}: {error.strerror} Bring it back, and the same "
            "command continues"
        ) from error
