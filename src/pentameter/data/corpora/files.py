"""Documents inside a file: text, records in JSONL or a JSON array, tables or tar archives, plain or
compressed (gzip, Zstandard).

Files are read as bytes and decoded as UTF-8, so line ends stay as they are; a byte order mark at
the start is an encoding mark, not text, and is dropped. Other encodings become UTF-8 while reading,
so that counts of bytes (bits per byte, `max_bytes`) do not depend on a file's encoding. A text file
is one document; a `.jsonl` or `.ndjson` file has one per record, a `.json` file too where the files
of a corpus are all of records, a table one per row, and a tar archive those of the files in it.
"""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from pentameter.config.data_schema import FILE_DEFAULTS
from pentameter.data.corpora.archives import members
from pentameter.data.corpora.compression import (
    TAR_SUFFIX,
    chunked_file,
    compression_of,
    decompressed,
    open_decompressed,
    uncompressed_name,
)
from pentameter.data.corpora.file_kinds import (
    MARKS,
    START_BYTES,
    detect_kind,
    is_binary,
    lacks_text,
)
from pentameter.data.corpora.records.forms import forms_read
from pentameter.data.corpora.records.json_array import array_rows
from pentameter.data.corpora.records.rows import BadRowError, Row, Rows, field_value, has_field
from pentameter.data.corpora.tables import (
    LONGEST_ROW_BYTES,
    columns_of,
    has_column,
    is_table,
    read_rows,
)
from pentameter.disk.atomic import sha256_of, storage_errors
from pentameter.errors import CorruptError, lone_surrogate

# Small on purpose: decoding chunks of a MiB left holes in glibc's heap that it did not fill again
# (0.4 GB more after each GB read); at 64 KiB memory stays flat, and the work in the fast cache.
CHUNK_BYTES = 1 << 16
JSONL_SUFFIXES = (".jsonl", ".ndjson")
JSON_SUFFIX = ".json"
TOKEN_SUFFIX = ".bin"
LONGEST_LINE_BYTES = LONGEST_ROW_BYTES  # of JSONL: a line is held whole, a few times over
USUAL_COMPRESSION = 3  # of English text by gzip; only the progress bar's total depends on it


@dataclass(frozen=True)
class FileContents:
    """The way in which the files of a corpus are read: the text encoding, and the name of the field
    or column with the text."""

    encoding: str = FILE_DEFAULTS["encoding"]
    """The encoding of text and JSONL files, by its Python name."""
    text_field: str = FILE_DEFAULTS["text_field"]
    """The field of a record, or the table's column, that holds a document's text; with dots,
    fields within one another."""
    form: str = FILE_DEFAULTS["form"]
    """The form of the records, `data.form`."""
    bad_rows: str = FILE_DEFAULTS["bad_rows"]
    """The treatment of rows that cannot be used, `data.bad_rows`."""
    json_has_records: bool = False
    """Whether `.json` files are read as records; else each is one text."""

    @property
    def is_utf8(self) -> bool:
        """Whether bytes are decoded as UTF-8."""
        return codecs.lookup(self.encoding).name in ("utf-8", "utf-8-sig")

    @property
    def key(self) -> dict[str, str | bool]:
        """JSON values that decide the text which is read of the same files."""
        json_records = {"json_has_records": True} if self.json_has_records else {}
        return {"encoding": self.encoding, "text_field": self.text_field, **json_records}

    def has_records(self, name: str) -> bool:
        """Return whether a file with this name, which is of no table, has a record for each
        document."""
        return is_jsonl(name) or (self.json_has_records and is_json(name))


UTF8 = FileContents()


class InputFile(Protocol):
    """Protocol of a file with text or records, local, remote or generated; `str()` names it in
    messages."""

    @property
    def name(self) -> str:
        """The last part of its path, whose suffixes tell its format."""

    @property
    def n_bytes(self) -> int:
        """Approximate bytes of text in it. Raises StorageError if it cannot be read."""

    @property
    def key(self) -> list[str | int | None] | str | None:
        """JSON values that identify the file's content without reading it; None if it must be read
        to know."""

    def sha256(self) -> str:
        """Return its sha256, in hex, reading all of it."""

    def documents(self, contents: FileContents) -> Iterator[Iterator[str]]:
        """Yield its documents, each an iterator of text chunks to be read before the next document
        is asked for. Raises CorruptError, StorageError and ConfigError as `read_documents` does."""

    def records(self, contents: FileContents, fields: Sequence[str]) -> Rows:
        """Yield its rows (JSON objects or rows of a table), each with its file and line or row. For
        a table, `contents.text_field` and `fields` are the columns read. Raises CorruptError,
        StorageError and ConfigError as `read_records` does."""


@dataclass(frozen=True)
class LocalFile:
    """An `InputFile` on this machine. Its `key` is None: only reading it tells whether it has
    changed."""

    path: Path
    key: None = None

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.name

    @property
    def n_bytes(self) -> int:
        """Approximate bytes of text in it; compressed files count three times their size. Raises
        StorageError if it cannot be read."""
        with storage_errors(self.path, "read"):
            size = self.path.stat().st_size
        is_small = bool(compression_of(self.name)) or self.name.lower().endswith(".parquet")
        return size * USUAL_COMPRESSION if is_small else size

    def lacks_text(self, *, is_utf8: bool) -> bool:
        """Return whether the file begins as a picture, a program or, where UTF-8 is meant, other
        binary data does. False if its suffix says how to read it (table, archive, compressed), for
        token ids (`.bin`), and if it cannot be read."""
        name = self.name.lower()
        if is_table(name) or compression_of(name) or name.endswith((TAR_SUFFIX, TOKEN_SUFFIX)):
            return False
        try:
            with self.path.open("rb") as stream:
                return lacks_text(stream.read(START_BYTES), is_utf8=is_utf8)
        except OSError:  # reading it says why
            return False

    def sha256(self) -> str:
        """Return its sha256, in hex, reading all of it."""
        return sha256_of(self.path)

    def documents(self, contents: FileContents) -> Iterator[Iterator[str]]:
        """Yield its documents, each an iterator of text chunks to be read before the next document
        is asked for. Raises CorruptError, StorageError and ConfigError as `read_documents` does."""
        return read_documents(self.path, contents)

    def records(self, contents: FileContents, fields: Sequence[str]) -> Rows:
        """Yield its rows (JSON objects or rows of a table), each with its file and line or row. For
        a table, `contents.text_field` and `fields` are the columns read. Raises CorruptError,
        StorageError and ConfigError as `read_records` does."""
        return read_records(self.path, contents, fields)

    def __str__(self) -> str:
        return str(self.path)


def is_jsonl(name: str) -> bool:
    """Return True if a file name, without compression suffix, ends in .jsonl or .ndjson."""
    return uncompressed_name(name).endswith(JSONL_SUFFIXES)


def is_json(name: str) -> bool:
    """Return True if a file name, without compression suffix, ends in .json."""
    return uncompressed_name(name).endswith(JSON_SUFFIX)


def read_documents(file: Path, contents: FileContents = UTF8) -> Iterator[Iterator[str]]:
    """Yield a file's documents, each as an iterator of text chunks; a table's null values are
    skipped.

    Raises CorruptError, with file and position, if the content contradicts the name: another
    encoding, a NUL in a text file (binary data), a line longer than `LONGEST_LINE_BYTES`, a table
    without the column, damaged compression. A document that is a record which is not JSON, or lacks
    a string in its text field, raises BadRowError when it is read. StorageError if the file cannot
    be read; ConfigError for `.zst` or a table without the package that decodes it.
    """
    field = contents.text_field
    if is_table(file.name):
        if not has_column(file, field):
            raise CorruptError(
                f"{file} has no column {field!r} (its columns are {sorted(columns_of(file))}); "
                f"{no_form(field)}"
            )
        for row, where in read_rows(file, [field]):
            if isinstance(row, BadRowError) or has_field(row, field):
                yield _document_of(row, field, where)
    elif uncompressed_name(file.name).endswith(TAR_SUFFIX):
        with open_decompressed(file) as archive:
            for name, content in members(archive, str(file)):
                where = f"{file}: {name}"
                opened = decompressed(content, name, where)
                yield from _documents_in(opened, name, where, contents)
    else:
        yield from _documents_in(open_decompressed(file), file.name, str(file), contents)


def _documents_in(
    opened: AbstractContextManager[BinaryIO], name: str, where: str, contents: FileContents
) -> Iterator[Iterator[str]]:
    """Yield the documents in a file or an archive's member, each as an iterator of text chunks.
    `opened` is a context manager that yields its decompressed bytes. If `name` is of a file of
    records, each is a document, otherwise the whole text is one. `where` names the file in
    messages."""
    if not contents.has_records(name):
        yield _text_in(opened, where, contents)
        return
    with opened as stream:
        for row, line in _rows_in(stream, where, contents):
            yield _document_of(row, contents.text_field, line)


def _text_in(
    opened: AbstractContextManager[BinaryIO], where: str, contents: FileContents
) -> Iterator[str]:
    # A generator of its own: reading fails where its chunks are asked for.
    with opened as stream:
        yield from _decoded(stream, where, contents)


def _decoded(stream: BinaryIO, file: str, contents: FileContents) -> Iterator[str]:
    """Yield a byte stream's text in chunks of about CHUNK_BYTES bytes, without a byte order mark;
    `file` names it in messages. Chunk ends depend only on the content. Raises CorruptError for
    bytes that are not text."""
    is_utf8 = contents.is_utf8
    encoding = "utf-8" if is_utf8 else contents.encoding
    # It keeps the bytes of a character that a block cuts, and its state where there is one.
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    offset = n_characters = 0  # before the next block
    begins_line = True
    is_ended = False
    while not is_ended:
        block = stream.read(CHUNK_BYTES)
        is_ended = not block
        if offset == 0:
            refuse_other_kinds(file, block)
        first = offset - len(decoder.getstate()[0])  # offset of the bytes decoded now
        try:
            text = decoder.decode(block, final=is_ended)
            if not is_utf8:
                text.encode()  # some decoders let half a surrogate pair pass
        except UnicodeError as error:
            raise _undecodable(file, encoding, error, first) from error
        if (nul := text.find("\0")) >= 0:
            position = f"NUL at character {n_characters + nul}"
            if is_utf8:
                position = f"NUL byte at offset {first + len(text[:nul].encode())}"
            raise CorruptError(
                f"{file} is binary, not {'' if is_utf8 else f'{encoding} '}text: {position}; "
                f"{_BINARY_HINT}"
            )
        n_characters += len(text)
        offset += len(block)
        chunk = text.replace("\n\ufeff", "\n")  # the marks of files that were joined
        if begins_line:
            chunk = chunk.removeprefix("\ufeff")
        if text:
            begins_line = text.endswith("\n")
        if chunk:
            yield chunk


def _undecodable(
    file: str, encoding: str, error: UnicodeError, offset: int, line: int | None = None
) -> CorruptError:
    """Return the CorruptError for bytes that cannot be decoded as text, with a hint at the likely
    encoding.

    file: names the file in the message.
    encoding: the one that was tried.
    error: what the decoder raised.
    offset: where in the file the bytes begin that were given to the decoder.
    line: the line number in a JSONL file; None in any other.
    """
    name = codecs.lookup(encoding).name
    position, hint = str(error), _ENCODING_HINT
    if isinstance(error, UnicodeDecodeError):
        position = f"byte 0x{error.object[error.start]:02x} at offset {offset + error.start}"
        position += f" ({error.reason})"
        marks = [name for name, mark in MARKS.items() if error.object.startswith(mark)]
        if offset == 0 and marks and name == "utf-8":
            hint = f"it begins as {marks[0].upper()} does: --data.encoding {marks[0]}"
        elif is_binary(error.object[:CHUNK_BYTES]):
            hint = _BINARY_HINT
    if "BOM" in position:  # as Python names UTF-16 and UTF-32 without a mark
        hint = f"name the order of its bytes: {name}-le or {name}-be"
    if file.endswith(TOKEN_SUFFIX):
        hint = (
            "are these token ids? `pentameter prepare FILE.bin --tokenizer gpt2 --out DIR` "
            "imports them; prepared shards are a data.path of their own"
        )
    where = file if line is None else f"{file}, line {line}"
    return CorruptError(f"{where} is not {name.upper()} text: {position}; {hint}")


_BINARY_HINT = (
    "no encoding makes text of it, unless it is UTF-16 without a mark (--data.encoding utf-16-le): "
    "get its text with the program that wrote it, or leave it out"
)
_ENCODING_HINT = (
    "name its encoding (--data.encoding gb18030, utf-16, latin-1, …; in prepare --encoding), or "
    "leave it out"
)


def refuse_other_kinds(file: str, start: bytes) -> None:
    """Raise CorruptError if a file's first bytes, `start`, are those of an image, archive or other
    kind without text; `file` names it."""
    if (kind := detect_kind(start)) is not None:
        remedy = kind.remedy.replace("FILE", file)
        raise CorruptError(f"{file} is {kind.name}, not text; {remedy}")


def read_records(file: Path, contents: FileContents = UTF8, fields: Sequence[str] = ()) -> Rows:
    """Yield each JSON record, or each row of a table, as a dict with its file and line or row for
    messages; empty lines are skipped. JSON gives all fields, a table its text field and the columns
    `fields`; a record may lack any of them. Rows that are no records are errors in place of dicts.

    Raises CorruptError for content that is damaged, StorageError if the file cannot be read,
    ConfigError without the package that decodes it.
    """
    if is_table(file.name):
        yield from read_rows(file, [contents.text_field, *fields])
        return
    with open_decompressed(file) as stream:
        yield from _rows_in(stream, str(file), contents)


def _rows_in(stream: BinaryIO, file: str, contents: FileContents) -> Rows:
    """Yield the rows in a byte stream of JSONL, or of a JSON array, which begins with a bracket,
    each with its place; `file` names it in messages."""
    offset, is_start = 0, True  # before the first record
    chunks = _decoded(stream, file, contents)
    utf8 = stream if contents.is_utf8 else chunked_file(chunk.encode() for chunk in chunks)
    for number in itertools.count(1):
        line = utf8.readline(CHUNK_BYTES if is_start else LONGEST_LINE_BYTES + 1)
        if not line:
            return
        if is_start and line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            whole = chunked_file(itertools.chain([line], iter(lambda: utf8.read(CHUNK_BYTES), b"")))
            yield from array_rows(_decoded(whole, file, UTF8), file)
            return
        if is_start and not line.endswith(b"\n"):
            line += utf8.readline(LONGEST_LINE_BYTES + 1 - len(line))
        if number == 1:
            refuse_other_kinds(file, line)
        if len(line) > LONGEST_LINE_BYTES:
            raise CorruptError(
                f"{file}, line {number} is longer than {LONGEST_LINE_BYTES >> 20} MiB; JSONL "
                "has one object a line. Divide the record, or write its text to a .txt file"
            )
        record = line.removeprefix(codecs.BOM_UTF8)  # of any file that was joined to others
        if record.strip():
            is_start = False
            where = f"{file}, line {number}"
            try:
                decoded = record.decode()
            except UnicodeDecodeError as error:
                first = offset + len(line) - len(record)
                yield BadRowError(_undecodable(file, "utf-8", error, first, number)), where
            else:
                yield _parsed(decoded, contents.text_field, where), where
        offset += len(line)


def _parsed(record: str, field: str, where: str) -> Row:
    """Return the object in `record`, a line of JSONL, or the error that says that it is none, at
    `where`; its message names the text `field`."""
    try:
        parsed = json.loads(record)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):  # its line is the record's, which is one
            reason = f"{error.msg}, column {error.colno}"
        return BadRowError(
            f"{where} is not JSON ({reason}); JSONL has one object a line, with its text in "
            f"{field!r}"
        )
    if not isinstance(parsed, dict):
        return BadRowError(f"{where} has no field {field!r} (no object); {NAME_THE_FIELD}")
    return parsed


def _document_of(row: Row, field: str, where: str) -> Iterator[str]:
    """Yield the text in the `field` of a row, at once. Raises BadRowError, at `where`, if it is
    absent, no string, or cannot be encoded as UTF-8, and for a row that is no record."""
    if isinstance(row, BadRowError):
        raise row
    if not has_field(row, field):
        raise BadRowError(
            f"{where} has no field {field!r} (its keys are {sorted(row)}); {NAME_THE_FIELD}"
        )
    text = field_value(row, field, where)
    if not isinstance(text, str):
        raise BadRowError(
            f"{where}: {field!r} is {type(text).__name__} {text!r:.40}, not a string; write the "
            "document's text, or leave the record out"
        )
    check_encodable(text, repr(field), where)
    yield text


NAME_THE_FIELD = (
    "name the field of the document's text with --data.text-field (in prepare --text-field)"
)


def no_form(field: str) -> str:
    """Return the end of a message about records that have neither the text `field` nor a form: what
    can be done, and a table of the forms that are read."""
    return (
        f"{NAME_THE_FIELD}, or write conversations in one of the forms that are read, by their "
        f"keys:\n{forms_read(field)}"
    )


def check_encodable(text: str, what: str, where: str) -> None:
    """Raise BadRowError if a text holds half a surrogate pair; `what` and `where` name the text and
    its place in the message."""
    if (at := lone_surrogate(text)) is not None:
        raise BadRowError(
            f"{where}: {what} holds half a surrogate pair (\\u{ord(text[at]):04x}), which is no "
            "character; write both halves, or leave it out"
        )
