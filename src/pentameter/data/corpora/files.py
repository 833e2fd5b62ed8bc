"""The documents inside a file: text or JSONL records, plain, gzipped or as Zstandard.

Files are read as bytes and decoded as UTF-8, so line ends stay as they are; a byte order mark at
the start of a file is an encoding mark, not text, and is dropped. A file in another encoding
becomes UTF-8 on the way in, so that all that counts bytes of text (bits per byte, `max_bytes`)
counts the same whatever the file's encoding. A text file is one document; of a `.jsonl` or
`.ndjson` file each record's text is one.
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import io
import itertools
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from pentameter.config.data_schema import FILE_DEFAULTS
from pentameter.data.corpora.file_kinds import is_binary, kind_of
from pentameter.errors import ConfigError, CorruptError, StorageError

# Small on purpose: decoding pieces of a MiB left holes in glibc's heap that it did not fill again
# (0.4 GB more after each GB read); at 64 KiB memory stays flat, and the work in the fast cache.
PIECE_BYTES = 1 << 16
JSONL_SUFFIXES = (".jsonl", ".ndjson")
COMPRESSED_SUFFIXES = (".gz", ".zst")
LONGEST_LINE_BYTES = 1 << 25  # of JSONL: a line is held whole, a few times over
USUAL_COMPRESSION = 3  # of English text by gzip; only the progress bar's total depends on it


@dataclass(frozen=True)
class FileContents:
    """Settings for reading the text in files."""

    encoding: str = FILE_DEFAULTS["encoding"]
    """One that `pentameter.config.text_encoding` takes."""
    text_field: str = FILE_DEFAULTS["text_field"]
    """The field of a JSONL record that holds its text."""

    @property
    def is_utf8(self) -> bool:
        """True if the bytes are taken as they are; a byte order mark is dropped anyway."""
        return codecs.lookup(self.encoding).name in ("utf-8", "utf-8-sig")


UTF8 = FileContents()


def about_bytes(file: Path) -> int:
    """The approximate bytes of text in a file. Raises StorageError when it cannot be read."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror}") from error
    return size * USUAL_COMPRESSION if _compression(file) else size


def is_jsonl(file: Path) -> bool:
    """True if a file's name says that it holds one record a line, compressed or not."""
    return file.name.lower().removesuffix(_compression(file)).endswith(JSONL_SUFFIXES)


def read_documents(file: Path, contents: FileContents = UTF8) -> Iterator[Iterator[str]]:
    """The documents of a file, each as its pieces.

    Raises CorruptError, with the place, where the file is not what its name says: not in its
    encoding, a NUL in a text file (binary data), a record that is not JSON, has no string in its
    text field or a line longer than `LONGEST_LINE_BYTES`, damaged compression. StorageError when
    it cannot be read; ConfigError for `.zst` without a decoder.
    """
    if is_jsonl(file):
        for record, where in read_records(file, contents):
            yield iter((_record_text(record, contents.text_field, where),))
    else:
        yield read_pieces(file, PIECE_BYTES, contents)


def read_pieces(
    file: Path, piece_bytes: int = PIECE_BYTES, contents: FileContents = UTF8
) -> Iterator[str]:
    """The text of a file in pieces of about `piece_bytes` bytes of the file's text.

    Where the pieces end depends only on the content. Raises as `read_documents` does.
    """
    with _open(file) as stream:
        yield from _decoded(stream, file, contents, piece_bytes)


def _decoded(
    stream: BinaryIO, file: Path, contents: FileContents, piece_bytes: int
) -> Iterator[str]:
    """The text of a stream in pieces, without a byte order mark."""
    is_utf8 = contents.is_utf8
    encoding = "utf-8" if is_utf8 else contents.encoding
    # It keeps the bytes of a character that a block cuts, and its state where there is one.
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    offset = n_characters = 0  # before the next block
    is_ended = False
    while not is_ended:
        block = stream.read(piece_bytes)
        is_ended = not block
        if offset == 0:
            refuse_other_kinds(file, block)
        first = offset - len(decoder.getstate()[0])  # the place of what is decoded now
        try:
            text = decoder.decode(block, final=is_ended)
            if not is_utf8:
                text.encode()  # some decoders let half a surrogate pair pass
        except UnicodeError as error:
            raise _undecodable(file, encoding, error, first) from error
        if (nul := text.find("\0")) >= 0:
            place = f"NUL at character {n_characters + nul}"
            if is_utf8:
                place = f"NUL byte at offset {first + len(text[:nul].encode())}"
            raise CorruptError(
                f"{file} is binary, not {'' if is_utf8 else f'{encoding} '}text: {place}; "
                f"{_BINARY_HINT}"
            )
        if piece := text if n_characters else text.removeprefix("\ufeff"):
            yield piece
        offset += len(block)
        n_characters += len(text)


def _undecodable(
    file: Path, encoding: str, error: UnicodeError, offset: int, line: int | None = None
) -> CorruptError:
    """The error of bytes that are not text; those that were decoded begin at `offset`."""
    name = codecs.lookup(encoding).name
    place, hint = str(error), _ENCODING_HINT
    if isinstance(error, UnicodeDecodeError):
        place = f"byte 0x{error.object[error.start]:02x} at offset {offset + error.start}"
        place += f" ({error.reason})"
        marks = [name for name, mark in _MARKS.items() if error.object.startswith(mark)]
        if offset == 0 and marks and name == "utf-8":
            hint = f"it begins as {marks[0].upper()} does: --data.encoding {marks[0]}"
        elif is_binary(error.object[:PIECE_BYTES]):
            hint = _BINARY_HINT
    if "BOM" in place:  # what Python says of UTF-16 and UTF-32
        hint = f"name the order of its bytes: {name}-le or {name}-be"
    if file.suffix == ".bin":
        hint = (
            "are these token ids? `pentameter prepare FILE.bin --tokenizer gpt2 --out DIR` "
            "imports them; prepared shards are a data.path of their own"
        )
    where = file if line is None else f"{file}, line {line}"
    return CorruptError(f"{where} is not {name.upper()} text: {place}; {hint}")


_MARKS = {
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),  # first: UTF-16's mark begins UTF-32's
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
_BINARY_HINT = (
    "no encoding makes text of it, unless it is UTF-16 without a mark (--data.encoding utf-16-le): "
    "get its text with the program that wrote it, or leave it out"
)
_ENCODING_HINT = (
    "name its encoding (--data.encoding gb18030, utf-16, latin-1, …; in prepare --encoding), or "
    "leave it out"
)


def refuse_other_kinds(file: Path, start: bytes) -> None:
    """Raise CorruptError where a file that begins with these bytes is known to hold no text."""
    if (kind := kind_of(start)) is not None:
        remedy = kind.remedy.replace("FILE", str(file))
        raise CorruptError(f"{file} is {kind.name}, not text; {remedy}")


def read_records(file: Path, contents: FileContents = UTF8) -> Iterator[tuple[dict[str, Any], str]]:
    """Each record of a JSONL file, and where it stands; empty lines are passed over.

    Raises as `read_documents` does, but for what a record must hold.
    """
    offset = 0
    with _open(file) as stream:
        pieces = _decoded(stream, file, contents, PIECE_BYTES)
        utf8 = stream if contents.is_utf8 else io.BufferedReader(_Utf8Stream(pieces))
        for number in itertools.count(1):
            line = utf8.readline(LONGEST_LINE_BYTES + 1)
            if not line:
                return
            if number == 1:
                refuse_other_kinds(file, line)
            if len(line) > LONGEST_LINE_BYTES:
                raise CorruptError(
                    f"{file}, line {number} is longer than {LONGEST_LINE_BYTES >> 20} MiB; JSONL "
                    "has one object a line. Divide the record, or write its text to a .txt file"
                )
            record = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if record.strip():
                try:
                    decoded = record.decode()
                except UnicodeDecodeError as error:
                    first = offset + len(line) - len(record)
                    raise _undecodable(file, "utf-8", error, first, number) from error
                where = f"{file}, line {number}"
                yield _parsed(decoded, contents.text_field, where), where
            offset += len(line)


def _parsed(record: str, field: str, where: str) -> dict[str, Any]:
    """The object of a line; `field` is where its text is looked for, for messages."""
    try:
        parsed = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"{where} is not JSON ({error}); JSONL has one object a line, with its text in "
            f"{field!r}"
        ) from error
    if not isinstance(parsed, dict):
        raise CorruptError(
            f"{where} has no field {field!r} (no object); name the field of the document's text "
            "with --data.text-field (in prepare --text-field)"
        )
    return parsed


def _record_text(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise CorruptError(
            f"{where} has no field {field!r} (its keys are {sorted(record)}); name the field of "
            "the document's text with --data.text-field (in prepare --text-field)"
        )
    text = record[field]
    if not isinstance(text, str):
        raise CorruptError(
            f"{where}: {field!r} is {type(text).__name__} {text!r:.40}, not a string; write the "
            "document's text, or leave the record out"
        )
    check_whole(text, repr(field), where)
    return text


def check_whole(text: str, what: str, where: str) -> None:
    """Raise CorruptError where a text of a record, called `what`, is none that UTF-8 can hold."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CorruptError(
                f"{where}: {what} holds half a surrogate pair "
                f"(\\u{ord(text[error.start]):04x}), which is no character; write both halves, "
                "or leave it out"
            ) from error


def _compression(file: Path) -> str:
    """`.gz`, `.zst`, or nothing."""
    suffix = file.suffix.lower()
    return suffix if suffix in COMPRESSED_SUFFIXES else ""


@contextmanager
def _open(file: Path) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed; reads are full until the end."""
    errors: list[type[Exception]] = [EOFError, gzip.BadGzipFile, zlib.error]
    try:
        with file.open("rb") as stream:
            match _compression(file):
                case ".gz":
                    yield cast(BinaryIO, gzip.GzipFile(fileobj=stream))
                case ".zst":
                    zstd = _zstd()
                    errors.append(zstd.ZstdError)
                    yield zstd.ZstdFile(stream)
                case _:
                    yield stream
    except tuple(errors) as error:
        raise CorruptError(
            f"{file} is damaged or cut short ({error}); fetch it again, or leave it out"
        ) from error
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror}") from error


class _Utf8Stream(io.RawIOBase):
    """Pieces of text as a stream of UTF-8."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces, self._ready = pieces, memoryview(b"")

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The number of bytes put into `buffer`; 0 at the end."""
        while not self._ready and (piece := next(self._pieces, None)) is not None:
            self._ready = memoryview(piece.encode())
        n = min(len(buffer), len(self._ready))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n


def _zstd() -> Any:
    """Python's module for Zstandard."""
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"reading .zst files needs the package {name}, which is not installed; "
            "`pip install 'pentameter[zstd]'`, or decompress them with `zstd -d`"
        ) from error
