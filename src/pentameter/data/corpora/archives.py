"""Files in a tar archive, read one after another as streams: nothing is unpacked to a disk.

The formats are those of POSIX (ustar, pax) and of GNU tar. Python's `tarfile` keeps each file's
header in memory, takes a damaged header for the archive's end, and reads headers of any length. A
subclass of its `TarInfo` can mend these, and not what is parsed where none can reach: a size that
is no number counts as 0, a pax record may end behind its header, and the map of a sparse file is
read to any length, in quadratic time (two minutes for 20 MB).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import BinaryIO

from pentameter.data.corpora.compression import chunked_file
from pentameter.errors import CorruptError

LONGEST_HEADER_BYTES = 1 << 20
"""Maximum bytes of a long name, or of pax's keys, before a file."""

_BLOCK_BYTES = 512
_READ_BYTES = 1 << 16
_REGULAR, _FOLDER, _SPARSE = b"0", b"5", b"S"
_AS_REGULAR, _WITHOUT_CONTENT = b"0\x007", b"123456"  # symlinks, devices, folders, pipes
_GNU_NAME, _GNU_LINK, _PAX, _PAX_OF_ALL = b"L", b"K", (b"x", b"X"), b"g"
_PAX_LENGTH = re.compile(rb"(\d{1,7}) ")


@dataclass
class _Header:
    """Header of one file in a tar archive: its name, its size in bytes, and its type, the byte that
    tar uses."""

    name: str
    size: int
    kind: bytes


def members(stream: BinaryIO, where: str) -> Iterator[tuple[str, BinaryIO]]:
    """Yield the name and content stream of each regular file in a tar archive, in order; each must
    be read before the next is asked for. Hidden files, symlinks and devices are left out.

    Raises CorruptError if the archive is damaged or truncated, or holds a file with holes; `where`
    names it in the message.
    """
    archive = _Archive(stream, where)
    while (header := archive.next_header()) is not None:
        content = archive.chunks(header.size)
        parts = PurePosixPath(header.name).parts
        is_hidden = any(part[0] == "." and part != ".." for part in parts)
        if not is_hidden and header.kind == _SPARSE:
            raise CorruptError(
                f"{where}: {header.name} is stored as a file with holes (sparse), in which there "
                "is no text; pack it without --sparse, or leave it out"
            )
        if not is_hidden and header.kind == _REGULAR:
            yield header.name, chunked_file(content)
        for _ in content:  # what was not read of it
            pass


class _Archive:
    """Reader of the blocks in a tar archive, in order. `stream.read` must return fewer bytes than
    asked for only at the end."""

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self._stream, self._where = stream, where
        self._offset = 0
        self._for_all: dict[str, bytes] = {}

    def read(self, n_bytes: int) -> bytes:
        """Return the next `n_bytes`; CorruptError if the archive ends before."""
        data = self._stream.read(n_bytes)
        self._offset += len(data)
        if len(data) < n_bytes:
            raise self._damage("it has no end mark")
        return data

    def chunks(self, n_bytes: int) -> Iterator[bytes]:
        """Yield a file's content, the next `n_bytes`, in chunks, then skip the padding of its last
        block. Raises CorruptError if the archive ends before."""
        for start in range(0, n_bytes, _READ_BYTES):
            yield self.read(min(_READ_BYTES, n_bytes - start))
        self.read(-n_bytes % _BLOCK_BYTES)

    def next_header(self) -> _Header | None:
        """Return the next file's header, with name and size from extension headers (GNU, pax)
        before it; None at the archive's end."""
        keys = dict(self._for_all)
        while (block := self._next_block()) is not None:
            header = self._parsed(block)
            if header.kind in (_GNU_NAME, _GNU_LINK, *_PAX, _PAX_OF_ALL):
                content = self._extra(header.size)
                if header.kind == _GNU_NAME:
                    keys["path"] = content.partition(b"\0")[0]
                elif header.kind in _PAX:
                    keys |= self._pax_keys(content)
                elif header.kind == _PAX_OF_ALL:
                    self._for_all |= self._pax_keys(content)
                    keys |= self._for_all
                continue
            if "size" in keys and header.kind not in _WITHOUT_CONTENT:
                header.size = self._number(keys["size"], 10)
            if "path" in keys:
                header.name = _as_text(keys["path"])
            if any(key.startswith("GNU.sparse.") for key in keys):
                header.kind = _SPARSE
            elif header.kind == _SPARSE:
                is_followed = block[482]
                while is_followed:  # by blocks with more of its map
                    is_followed = self.read(_BLOCK_BYTES)[504]
            return header
        return None

    def _next_block(self) -> bytes | None:
        """Return the next header block, after skipping blocks of zeros, which mark an archive's
        end; another archive may follow. None at the end of the stream."""
        has_end = False
        while block := self._stream.read(_BLOCK_BYTES):
            if any(block):
                if len(block) < _BLOCK_BYTES:
                    raise self._damage("it ends within a header")
                self._offset += len(block)
                return block
            self._offset += len(block)
            has_end = True
        if not has_end:
            raise self._damage("it has no end mark")
        return None

    def _parsed(self, block: bytes) -> _Header:
        """Return the header in a block; CorruptError if its checksum is wrong."""
        known, sums = self._number(block[148:156], 8), block[:148] + b" " * 8 + block[156:]
        # Some old programs summed signed bytes.
        if known != sum(sums) != known + 256 * sum(byte > 127 for byte in sums):
            raise self._damage(f"no header at byte {self._offset - _BLOCK_BYTES:,}")
        name = block[:100].partition(b"\0")[0]
        if block[257:263] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
            name = prefix + b"/" + name
        kind = block[156:157]
        if kind in _AS_REGULAR:
            is_folder = kind == b"\0" and name.endswith(b"/")  # of before POSIX
            kind = _FOLDER if is_folder else _REGULAR
        size = 0 if kind in _WITHOUT_CONTENT else self._number(block[124:136], 8)
        return _Header(_as_text(name), size, kind)

    def _number(self, field: bytes, base: int) -> int:
        """Return the number in a header's field: digits in `base`, or, for a large size, a
        big-endian integer after the byte 0x80."""
        if field[:1] == b"\x80":
            return int.from_bytes(field[1:])
        digits = field.partition(b"\0")[0].strip() or b"0"
        if not (digits.isdigit() and digits.isascii() and len(digits) <= _BLOCK_BYTES):
            raise self._damage(f"no number in the header before byte {self._offset:,}")
        try:
            return int(digits, base)
        except ValueError as error:  # 8 or 9
            raise self._damage(f"no number in the header before byte {self._offset:,}") from error

    def _extra(self, size: int) -> bytes:
        """Return the `size` bytes of an extension header, which describes the next file, and skip
        its padding."""
        if size > LONGEST_HEADER_BYTES:
            raise self._damage(f"a header of {size:,} bytes before byte {self._offset:,}")
        return self.read(size + -size % _BLOCK_BYTES)[:size]

    def _pax_keys(self, content: bytes) -> dict[str, bytes]:
        """Return key → value of a pax extension header, whose `content` is records of the form
        `LENGTH KEY=VALUE` and a line end."""
        keys, at = {}, 0
        while at < len(content.rstrip(b"\0")):
            length = int(found[1]) if (found := _PAX_LENGTH.match(content, at)) else 0
            key, equals, value = content[at : at + length].partition(b" ")[2].partition(b"=")
            if not equals or not value.endswith(b"\n"):
                raise self._damage(f"no pax header before byte {self._offset:,}")
            keys[_as_text(key)] = value[:-1]
            at += length
        return keys

    def _damage(self, reason: str) -> CorruptError:
        return CorruptError(
            f"{self._where} is damaged or cut short, or no tar archive ({reason}); fetch it again, "
            "or leave it out"
        )


def _as_text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")
