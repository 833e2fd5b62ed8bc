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
    """The folder that was at `path` when it was opened, by its device and inode."""

    path: Path
    device: int
    inode: int

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return the folder that is at `path` now. Raises OSError if there is none."""
        found = os.stat(path)
        return cls(path, found.st_dev, found.st_ino)

    def check(self, holds: Callable[[], bool]) -> None:
        """Raise StorageError unless `path` leads to this folder. `holds` says whether what lies
        there now has what only this one has: mounted a second time, it may be another device. What
        it cannot read (OSError) is not there."""
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
