"""Files in a tar archive, read one after another as streams: nothing is unpacked to a disk."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

from pentameter.errors import CorruptError

TAR_SUFFIX = ".tar"
_BLOCK_BYTES = 512
_READ_BYTES = 1 << 16


def members(stream: BinaryIO, where: str) -> Iterator[tuple[str, BinaryIO]]:
    """Yield the name and content stream of each regular file in a tar archive, in order; each must
    be read before the next is asked for. Hidden files, links and devices are left out.

    Raises CorruptError if the archive is damaged or truncated; `where` names it in the message.
    """
    noted = _LastBlock(stream)
    try:
        with tarfile.open(fileobj=cast(Any, noted), mode="r|") as archive:
            for member in archive:
                parts = PurePosixPath(member.name).parts
                if member.isreg() and not any(part.startswith(".") for part in parts):
                    content = archive.extractfile(member)
                    assert content is not None  # it is a regular file
                    yield member.name, cast(BinaryIO, content)
    except tarfile.TarError as error:
        raise _damage(where, str(error)) from error
    while noted.read(_READ_BYTES):  # up to the checksum of what the archive is compressed with
        pass
    if any(noted.last) or not noted.last:  # a whole archive ends with blocks of zeros
        raise _damage(where, "it has no end mark")


def _damage(where: str, reason: str) -> CorruptError:
    return CorruptError(
        f"{where} is damaged or cut short, or no tar archive ({reason}); fetch it again, or leave "
        "it out"
    )


class _LastBlock:
    """A wrapper that remembers in `last` the last 512 bytes read from a stream."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.last = b""

    def read(self, n_bytes: int = -1) -> bytes:
        """Return up to `n_bytes` from the stream; all for -1."""
        data = self._stream.read(n_bytes)
        self.last = (self.last + data)[-_BLOCK_BYTES:] if data else self.last
        return data
