"""Rows of a file: the values of their fields, and what becomes of rows that cannot be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pentameter.config.choices import look_up
from pentameter.errors import CorruptError

SKIP = "skip"
"""Value of `data.bad_rows` that leaves rows out."""
SKIPS = {"refuse": False, SKIP: True}
BAD_ROWS_SHOWN = 3
"""Most rows that a warning about rows left out names, with their reasons."""
LONGEST_REASON = 240
"""Most characters of such a reason that are kept."""


class BadRowError(CorruptError):
    """Raised for one row of a file that cannot be used, beside which others can: it is no JSON, has
    no answer, …"""


Row = dict[str, Any] | BadRowError
"""A record, or the error that says why a row is none."""
Rows = Iterator[tuple[Row, str]]
"""Rows of a file, each with its place for messages ("FILE, line 3" or "FILE, row 2")."""


class RowsRead:
    """The rows of one pass over files: how many were used, and of which forms, and those that
    cannot be used. Of these the first is refused, or they are left out and counted, as
    `data.bad_rows` says (`policy`, "refuse" or "skip")."""

    def __init__(self, policy: str) -> None:
        self._is_skipping = look_up(SKIPS, policy, "data.bad_rows", "reading rows")
        self._first: list[str] = []
        self.n_left_out = 0
        self.forms: Counter[str] = Counter()
        """Rows used, by what their form is called."""

    def leave_out(self, error: CorruptError) -> None:
        """Count a row that is left out, by the error that says why. Raises a BadRowError where such
        rows are refused, which also says how they are left out."""
        if not self._is_skipping:
            raise BadRowError(
                f"{error}; --data.bad-rows skip (in prepare --bad-rows skip) leaves such rows out"
            ) from error
        self.n_left_out += 1
        if len(self._first) < BAD_ROWS_SHOWN:
            reason = str(error)
            self._first.append(reason[:LONGEST_REASON] + "…" * (len(reason) > LONGEST_REASON))

    @property
    def used(self) -> str:
        """How many conversations were read, and their form, in words; of several forms each with
        its number."""
        if len(self.forms) == 1:
            forms = next(iter(self.forms))
        else:
            forms = ", ".join(f"{n:,} {form}" for form, n in self.forms.most_common())
        n_used = self.forms.total()
        return f"{n_used:,} conversation{'' if n_used == 1 else 's'}, {forms}"

    @property
    def first_left_out(self) -> str:
        """The places of the first rows left out, each with its reason, as one text."""
        return "; ".join([*self._first, *(["…"] if self.n_left_out > len(self._first) else [])])

    def warnings(self, n_used: int) -> list[str]:
        """Return a warning that says how many rows were left out, beside `n_used`, and where the
        first are; an empty list if none was."""
        if not self.n_left_out:
            return []
        are = "is" if self.n_left_out == 1 else "are"
        return [
            f"{self.n_left_out:,} of {n_used + self.n_left_out:,} rows {are} left out "
            f"(data.bad_rows={SKIP!r}): {self.first_left_out}"
        ]


def has_field(record: Mapping[str, Any], field: str) -> bool:
    """Return whether a record has a field: a key, or keys of objects within one another with dots
    between them (`meta.text`)."""
    return field in record or _inner(record, field) is not None


def field_value(record: Mapping[str, Any], field: str, where: str) -> Any:
    """Return the value of a record's `field`, which it has (`has_field`). Raises BadRowError, at
    `where`, if both a key of that name and a path of keys fit."""
    if "." not in field:
        return record[field]
    inner = _inner(record, field)
    if field not in record:
        return inner
    if inner is not None:
        raise BadRowError(
            f"{where} has a key {field!r}, and within {field.partition('.')[0]!r} what "
            f"{field!r} may name as well; rename one of them"
        )
    return record[field]


def _inner(record: Mapping[str, Any], field: str) -> Any:
    """Return the value at a path of keys with dots between them (a key may have dots itself), None
    if there is none."""
    first, *rest = field.split(".")
    for n in range(len(rest)):
        value = record.get(".".join([first, *rest[:n]]))
        if isinstance(value, dict):
            path = ".".join(rest[n:])
            found = value[path] if path in value else _inner(value, path)
            if found is not None:
                return found
    return None
