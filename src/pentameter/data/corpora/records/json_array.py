"""Records in JSON files: an array of objects, read one by one in bounded memory; and whether a file
holds records at all, or is one JSON document."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from pentameter.data.corpora.records.rows import BadRowError, Rows
from pentameter.errors import CorruptError

CHUNKS_LOOKED_AT = 16
"""Most chunks of a file's text by which it is known what it holds."""
LONGEST_RECORD = 1 << 25
"""Most characters of a record: it is held whole, a few times over."""
_SPACE = re.compile(r"[ \t\n\r]*")
_ARRAY = re.compile(r"\s*\[\s*\{")


def holds_records(chunks: Iterator[str]) -> bool:
    """Return whether a JSON file, whose text comes in `chunks`, holds records: it begins as an
    array of objects, or has several objects, each on a line of its own. Any other is one document;
    so is a file whose first line is not complete within the first chunks."""
    start = "".join(itertools.islice(chunks, CHUNKS_LOOKED_AT))
    if _ARRAY.match(start):
        return True
    line, _, rest = start.lstrip().partition("\n")
    try:
        return rest.lstrip().startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def array_rows(chunks: Iterator[str], file: str) -> Rows:
    """Yield the elements of a JSON array, each with its place: its number, counted from 1, and its
    line. Elements that are no objects are errors in place of rows.

    chunks: the file's text. file: names it in messages.

    Raises CorruptError for text that is no JSON, as the next record begins nowhere then, for an
    array that does not end, and for an element longer than LONGEST_RECORD.
    """
    text = _ArrayText(chunks, file)
    text.take()  # the opening bracket
    separator = "]" if text.next_character() == "]" else ","
    for number in itertools.count(1):
        if separator == "]":
            break
        text.next_character()
        where = f"{file}, record {number} (line {text.line})"
        value = text.value(where)
        yield (value if isinstance(value, dict) else _no_object(value, where)), where
        if (separator := text.take()) not in (",", "]"):
            found = f"{separator!r}" if separator else "the file's end"
            raise CorruptError(
                f"{where} is followed by {found}, not by a comma or the end of the array: the file "
                "is damaged or cut short; fetch it again"
            )
    if number == 1:
        text.take()
    if rest := text.next_character():
        raise CorruptError(
            f"{file}, line {text.line} goes on with {rest!r} behind its array; write one array, or "
            "JSONL, one object a line"
        )


def _no_object(value: Any, where: str) -> BadRowError:
    return BadRowError(
        f"{where} is {type(value).__name__} {value!r:.40}, no object; write it as one, "
        '{"text": …}, or leave it out'
    )


class _ArrayText:
    """The text of a JSON array on its way through memory: what was read and not yet used, in
    `_held` from `_at` on."""

    def __init__(self, chunks: Iterator[str], file: str) -> None:
        self._chunks, self._file = chunks, file
        self._held, self._at = "", 0
        self._line, self._counted = 1, 0  # the line of the character at `_counted`
        self._decode = json.JSONDecoder().raw_decode

    @property
    def line(self) -> int:
        """The number of the line with the next character, counted from 1."""
        self._line += self._held.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def next_character(self) -> str:
        """Return the next character that is no white space, which stays the next; "" at the end."""
        while True:
            space = _SPACE.match(self._held, self._at)
            assert space is not None  # it matches nothing, too
            self._at = space.end()
            if self._at < len(self._held) or not self._read(1):
                return self._held[self._at : self._at + 1]

    def take(self) -> str:
        """Return the next character that is no white space, and go on behind it; "" at the end."""
        character = self.next_character()
        self._at += len(character)
        return character

    def value(self, where: str) -> Any:
        """Return the next JSON value, and go on behind it. Raises CorruptError, at `where`, if
        there is none, or it is too long."""
        while True:
            n_held = len(self._held) - self._at
            try:
                found, end = self._decode(self._held, self._at)
            except json.JSONDecodeError as error:  # it may only be cut
                if n_held > LONGEST_RECORD:
                    raise CorruptError(
                        f"{where} is damaged ({error.msg}), or longer than {LONGEST_RECORD >> 20} "
                        "MiB; divide it, or write its text to a .txt file"
                    ) from error
                if not self._read(n_held):
                    line = self.line + self._held.count("\n", self._at, error.pos)
                    raise CorruptError(
                        f"{where} is not JSON ({error.msg}, line {line}), or the file is cut "
                        "short; mend it, or fetch it again"
                    ) from error
            except (ValueError, RecursionError) as error:  # a long number, many levels
                raise CorruptError(f"{where} is not JSON that can be read ({error})") from error
            else:
                # A number at the end may go on.
                if end < len(self._held) or not self._read(1):
                    self._at = end
                    return found

    def _read(self, n_characters: int) -> bool:
        """Read at least `n_characters` more, fewer at the file's end; return whether there was
        any. What was used is dropped."""
        line = self.line
        found, n_found = [self._held[self._at :]], 0
        for chunk in self._chunks:
            found.append(chunk)
            n_found += len(chunk)
            if n_found >= n_characters:
                break
        if n_found:
            self._held, self._at, self._counted, self._line = "".join(found), 0, 0, line
        return n_found > 0
