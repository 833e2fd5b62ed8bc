"""Opens compressed files (gzip, Zstandard) as streams of their content; a name's suffix tells the
format."""

from __future__ import annotations

import importlib
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from pentameter.disk.atomic import storage_errors
from pentameter.errors import CorruptError, missing_package

TAR_SUFFIX = ".tar"
_SUFFIXES = (".gz", ".zst")
_READ_BYTES = 1 << 16
_GZIP_FORMAT = 16 + zlib.MAX_WBITS  # zlib then reads header and checksum itself


def compression_of(name: str) -> str:
    """Return the compression suffix of a file name, `.gz` (also for `.tgz`) or `.zst`; "" if
    uncompressed."""
    name = name.lower()
    if name.endswith(".tgz"):
        return ".gz"
    return next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")


def uncompressed_name(name: str) -> str:
    """Return a file name in lower case without its compression suffix; `.tgz` becomes `.tar`."""
    name = name.lower()
    if name.endswith(".tgz"):
        return f"{name.removesuffix('.tgz')}{TAR_SUFFIX}"
    return name.removesuffix(compression_of(name))


@contextmanager
def open_decompressed(file: Path) -> Iterator[BinaryIO]:
    """Context manager that yields a file's decompressed bytes as a stream; StorageError if it
    cannot be opened."""
    with storage_errors(file, "read"):
        stream = file.open("rb")
    with stream, decompressed(stream, file.name, str(file)) as content:
        yield content


@contextmanager
def decompressed(stream: BinaryIO, name: str, where: str) -> Iterator[BinaryIO]:
    """Context manager that yields a stream's bytes, decompressed by the suffix of `name`. While it
    is open, errors for damaged compression become CorruptError and OSError becomes StorageError,
    with `where` in the message."""
    damage: list[type[Exception]] = [EOFError, zlib.error]
    if (kind := compression_of(name)) == ".zst":
        damage.append(_zstd().ZstdError)
    try:
        with storage_errors(where, "read"):
            match kind:
                case ".gz":
                    yield chunked_file(_gunzipped(stream))
                case ".zst":
                    yield _zstd().ZstdFile(stream)
                case _:
                    yield stream
    except tuple(damage) as error:
        raise CorruptError(
            f"{where} is damaged or cut short ({error}); fetch it again, or leave it out"
        ) from error


def chunked_file(chunks: Iterator[bytes]) -> BinaryIO:
    """Return a buffered binary stream over the bytes in `chunks`."""
    return cast(BinaryIO, io.BufferedReader(_ChunkedFile(chunks)))


class _ChunkedFile(io.RawIOBase):
    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._ready = chunks, memoryview(b"")

    def readable(self) -> bool:
        """Return True, as `io.BufferedReader` asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the next bytes; return their number, 0 at the end."""
        while not self._ready and (chunk := next(self._chunks, None)) is not None:
            self._ready = memoryview(chunk)
        n = min(len(buffer), len(self._ready))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n


def _gunzipped(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the content of gzip data. There may be several members, and zeros after them. Unlike
    Python's `gzip`, it refuses empty data, and does not read names byte by byte.

    Raises EOFError if the data end early, zlib.error if they are damaged.
    """
    if not (data := stream.read(_READ_BYTES)):
        raise EOFError("it is empty")
    while data:
        member = zlib.decompressobj(_GZIP_FORMAT)
        while not member.eof:
            if not data and not (data := stream.read(_READ_BYTES)):
                raise EOFError("it ends within its data")
            yield member.decompress(data, _READ_BYTES)
            data = member.unconsumed_tail
        data = member.unused_data
        while not (data := data.lstrip(b"\0")):
            if not (data := stream.read(_READ_BYTES)):
                return


def _zstd() -> Any:
    """Return Python's module for Zstandard compression. Raises ConfigError if it is not
    installed."""
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        instead = "decompress them with `zstd -d`"
        raise missing_package("reading .zst files", name, "zstd", instead) from error
