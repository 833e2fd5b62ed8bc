"""File kinds that hold no plain text, recognized by their first bytes, each with a way to get text.

Such a file is refused whatever the encoding setting, because some encodings turn any bytes into
text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

START_BYTES = 512
"""Number of bytes from a file's start that suffice to recognize it; a tar's magic ends at 262."""

_PANDAS = "python -c \"import pandas; pandas.read_{}('{}')[['text']].to_json('text.jsonl', {})\""
_AS_RECORDS = "orient='records', lines=True"
_TO_JSONL = f"write the column of its text as JSONL: {_PANDAS}"
_LEAVE_OUT = "leave it out"
_IMAGE = f"{_LEAVE_OUT}; a model reads text, not pictures, sound or film"
_DOCUMENT = "save it as plain text (pandoc FILE -o FILE.txt), and name that"
_UNPACK = "unpack it, and name the folder"
_WEIGHTS = "these are weights or arrays, not text; name the text to train on"
_TENSORS = r"[\x00-\xff]{3}[\x00-\xff]\0{4}\{\s*\"[^\"]{1,300}\":\s*\{"


@dataclass(frozen=True)
class FileKind:
    """A kind of file without plain text, and the remedy told to a user who named one as text."""

    name: str
    remedy: str


# First those of which others are a case. `FILE` in a remedy stands for the file's path.
_KINDS: tuple[tuple[re.Pattern[bytes], FileKind], ...] = tuple(
    (re.compile(pattern.encode("latin-1"), re.DOTALL), FileKind(name, remedy))
    for pattern, name, remedy in (
        (r"PAR1[\x00-\x1f]", "Parquet", "give it a name that ends in .parquet"),
        (r"ARROW1\0", "Arrow (Feather)", "give it a name that ends in .arrow"),
        (
            r"\xff\xff\xff\xff[\x00-\xff]{2}\0\0",
            "an Arrow stream",
            "give it a name that ends in .arrow",
        ),
        (r"Obj\x01", "Avro", "write it as JSONL, one object a line"),
        (r"SQLite format 3\0", "an SQLite database", "write the rows' text as JSONL"),
        (r"PK\x03\x04.{26,400}word/", "a Word document (docx)", _DOCUMENT),
        (r"PK\x03\x04.{26,400}xl/", "an Excel workbook (xlsx)", "save its sheets as JSONL"),
        (r"PK\x03\x04.{26}mimetypeapplication/epub", "an e-book (EPUB)", _DOCUMENT),
        (r"PK\x03\x04.{26}mimetypeapplication/vnd.oasis", "an OpenDocument file", _DOCUMENT),
        (r"PK\x03\x04.{26,60}\.npy", "NumPy arrays (npz)", _WEIGHTS),
        (r"PK\x03\x04.{26,90}data\.pkl", "a PyTorch file", _WEIGHTS),
        (r"PK(\x03\x04|\x05\x06)", "a ZIP archive", _UNPACK),
        (
            r".{257}ustar",
            "a tar archive",
            "give it a name that ends in .tar, .tar.gz or .tar.zst, or unpack it",
        ),
        (r"\x1f\x8b\x08", "gzip data", "give it a name that ends in .gz"),
        (r"\x28\xb5\x2f\xfd", "Zstandard data", "give it a name that ends in .zst"),
        (r"\xfd7zXZ\0|BZh[1-9]1AY&SY|\x04\x22\x4d\x18", "compressed", "decompress it, or as .gz"),
        (r"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07", "an archive", _UNPACK),
        (r"%PDF-", "a PDF document", "get its text with `pdftotext FILE`, and name that"),
        (r"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document", _DOCUMENT),
        (r"\{\\rtf1", "a document in Rich Text Format", _DOCUMENT),
        (r"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP|II\*\0|MM\0\*", "an image", _IMAGE),
        (r"RIFF.{4}WAVE|ID3[\x02-\x04]|OggS\0|fLaC", "a sound recording", _IMAGE),
        (r".{4}ftyp|\x1aE\xdf\xa3|RIFF.{4}AVI ", "a film or an image", _IMAGE),
        (r"\x93NUMPY", "a NumPy array", _WEIGHTS),
        (r"\x89HDF\r\n", "HDF5", _WEIGHTS),
        (r"GGUF[\x01-\x09]\0\0\0", "a model's weights (GGUF)", _WEIGHTS),
        (_TENSORS, "a model's weights (safetensors)", _WEIGHTS),
        (r"\x80[\x02-\x05](c|\x95|\}|\]|X|q)", "a Python pickle", _WEIGHTS),
        (r"\x7fELF|MZ[\x00-\xff]\0|\xcf\xfa\xed\xfe|\0asm", "a program", _LEAVE_OUT),
    )
)

MARKS = {
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),  # first: UTF-16's mark begins UTF-32's
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
"""Encoding → its byte order marks."""
_NOT_OF_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")

_TABLES = {
    ".csv": ("a table", _TO_JSONL.format("csv", "FILE", _AS_RECORDS)),
    ".tsv": ("a table", 'write the column of its text as JSONL, {"text": …} a line'),
    ".json": ("one JSON document", 'write its records as JSONL, {"text": …} a line'),
}


def detect_kind(start: bytes) -> FileKind | None:
    """Return the kind of a file from its first bytes (START_BYTES, or all of a shorter file); None
    for text and unknown kinds."""
    start = start[:START_BYTES]
    return next((kind for pattern, kind in _KINDS if pattern.match(start)), None)


def is_binary(start: bytes) -> bool:
    """Return True if more than one byte in a hundred of a file's beginning, `start`, is a control
    character other than white space and escape. Text does not look so, unless it is UTF-16 or
    UTF-32."""
    return 100 * len(_NOT_OF_TEXT.findall(start)) > len(start)


def lacks_text(start: bytes) -> bool:
    """Return whether a file's first bytes, `start`, are those of a picture, a recording, a program
    or unknown binary data, which a user would leave out of a corpus. False for text, for kinds that
    hold text in another form (PDF, ZIP, …), and for UTF-16 and UTF-32 with their marks."""
    if (kind := detect_kind(start)) is not None:
        return kind.remedy.startswith(_LEAVE_OUT)
    return is_binary(start) and not any(map(start.startswith, MARKS.values()))


def table_warning(files: Sequence[object]) -> str | None:
    """Return a warning, for the user, if the names of some `files` end in `.csv`, `.tsv` or
    `.json`, which are read as plain text, not as tables or JSON documents; None if none does."""
    tables = [file for file in map(str, files) if file.lower().endswith(tuple(_TABLES))]
    if not tables:
        return None
    name, remedy = _TABLES[PurePath(tables[0]).suffix.lower()]
    more = f" (and {len(tables) - 1:,} files like it)" if len(tables) > 1 else ""
    return (
        f"{tables[0]}{more} is {name}, and is read as plain text, with its separators, quotes and "
        f"names; {remedy.replace('FILE', tables[0])}"
    )
