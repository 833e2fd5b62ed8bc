"""File kinds that hold no plain text, recognized by their first bytes, each with a way to get text.

Such a file is refused whatever the encoding setting, because some encodings turn any bytes into
text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath

from pentameter.config.tables import packaged_table

START_BYTES = 512
"""Number of bytes from a file's start that suffice to recognize it; a tar's magic ends at 262."""

_TABLE = "data/corpora/file_kinds.toml"
_LEAVE_OUT = "leave it out"  # so the remedies begin where a file has no text in any form


@dataclass(frozen=True)
class FileKind:
    """A kind of file that holds no plain text, such as PDF, and the advice for a user who named
    such a file as text to train on."""

    name: str
    remedy: str


@cache
def _kinds() -> Sequence[tuple[re.Pattern[bytes], FileKind]]:
    """Return (pattern for a file's first bytes, kind), in the order in which they are tried."""
    table = packaged_table(_TABLE)
    remedies = table["remedies"]
    return [
        (re.compile(start.encode("latin-1"), re.DOTALL), FileKind(name, remedies.get(key, key)))
        for start, name, key in table["kinds"]
    ]


MARKS = {
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),  # first: UTF-16's mark begins UTF-32's
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
"""Encoding → its byte order marks."""
_NOT_OF_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def detect_kind(start: bytes) -> FileKind | None:
    """Return the kind of a file from its first bytes (START_BYTES, or all of a shorter file); None
    for text and unknown kinds."""
    start = start[:START_BYTES]
    return next((kind for pattern, kind in _kinds() if pattern.match(start)), None)


def is_binary(start: bytes) -> bool:
    """Return True if more than one byte in a hundred of a file's beginning, `start`, is a control
    character other than white space and escape. Text does not look so, unless it is UTF-16 or
    UTF-32."""
    return 100 * len(_NOT_OF_TEXT.findall(start)) > len(start)


def lacks_text(start: bytes, *, is_utf8: bool) -> bool:
    """Return True if a file that begins with the bytes `start` is a picture, a recording, a program
    or unknown binary data, which a user would leave out of a corpus. Return False for text (also
    UTF-16 and UTF-32 with their byte order marks), and for kinds that hold text in another form
    (PDF, ZIP, …). Unknown data may be text where another encoding than UTF-8 is meant."""
    if (kind := detect_kind(start)) is not None:
        return kind.remedy.startswith(_LEAVE_OUT)
    return is_utf8 and is_binary(start) and not any(map(start.startswith, MARKS.values()))


def table_warning(files: Sequence[object]) -> str | None:
    """Return a warning, for the user, if the names of some `files` end in `.csv`, `.tsv` or
    `.json`, which are read as plain text, not as tables or JSON documents; None if none does."""
    kinds = packaged_table(_TABLE)["tables"]
    tables = [file for file in map(str, files) if file.lower().endswith(tuple(kinds))]
    if not tables:
        return None
    name, remedy = kinds[PurePath(tables[0]).suffix.lower()]
    more = f" (and {len(tables) - 1:,} files like it)" if len(tables) > 1 else ""
    return (
        f"{tables[0]}{more} is {name}, and is read as plain text, with its separators, quotes and "
        f"names; {remedy.replace('FILE', tables[0])}"
    )
