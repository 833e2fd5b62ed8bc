"""Recognizes what files of records hold: documents, or conversations in one of the forms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from pentameter.data.corpora.files import FileContents, InputFile, is_json, is_jsonl, no_form
from pentameter.data.corpora.records.forms import (
    AUTO,
    TEXT,
    Form,
    form_of,
    judgement_in,
    record_fields,
)
from pentameter.data.corpora.records.json_array import holds_records
from pentameter.data.corpora.records.rows import SKIP, BadRowError, RowsRead, has_field
from pentameter.data.corpora.tables import is_table
from pentameter.errors import CorruptError

ROWS_LOOKED_AT = 64
"""Most rows by which it is known what files hold: the first may have no values, or be left out."""


def hold_records(files: Sequence[InputFile], contents: FileContents) -> bool:
    """Return True if all files are of records, by their names: tables, JSONL, and `.json` if these
    have records, as `contents` says."""
    return all(contents.has_records(file.name) or is_table(file.name) for file in files)


def hold_json_records(files: Sequence[InputFile], contents: FileContents) -> bool:
    """Return True if all files are of records, and some of them `.json`, which are so by how they
    begin. Raises StorageError for unreadable files, CorruptError for damaged ones."""
    as_text = replace(contents, json_has_records=False)
    arrays = [file for file in files if is_json(file.name)]
    others = (file for file in files if not is_json(file.name))
    return (
        bool(arrays)
        and all(is_jsonl(file.name) or is_table(file.name) for file in others)
        and all(holds_records(next(file.documents(as_text))) for file in arrays)
    )


def hold_conversations(
    files: Sequence[InputFile], contents: FileContents, warnings: list[str]
) -> bool:
    """Return whether files hold conversations: all are of records (`hold_records`), and the first
    has a form and not the text field, or has the form that `contents` names.

    warnings: gets a sentence if the records have the text field and a form, so that they are read
    as text. Raises CorruptError for records that have neither, or two forms, and for damaged files;
    StorageError for unreadable ones.
    """
    if not hold_records(files, contents) or contents.form == TEXT:
        return False
    if contents.form != AUTO:
        return True
    rows = itertools.chain.from_iterable(file.records(contents, record_fields()) for file in files)
    unusable = RowsRead(contents.bad_rows)
    refused: CorruptError | None = None
    for row, where in itertools.islice(rows, ROWS_LOOKED_AT):
        if isinstance(row, BadRowError):
            unusable.leave_out(row)
            refused = refused or row
            continue
        try:
            if has_field(row, contents.text_field):
                warnings += _also_fits(row, contents.text_field, where)
                return False
            if form_of(_keys(row), AUTO, where) is not None:
                warnings += _judged(row, where)
                return True
            if any(is_table(file.name) for file in files):  # the value may be null
                continue
            raise BadRowError(
                f"{where} has no field {contents.text_field!r} (its keys are {sorted(row)}); "
                f"{no_form(contents.text_field)}"
            )
        except BadRowError as error:
            if contents.bad_rows != SKIP:
                raise
            refused = refused or error
    if refused is not None:
        raise refused
    return False


def _also_fits(row: dict[str, object], text_field: str, where: str) -> list[str]:
    """Return a warning if a row with the text field has a form, too; else an empty list."""
    try:
        form: Form | None = form_of(_keys(row), AUTO, where)
    except BadRowError:
        form = None
    if form is None:
        return []
    return [
        f"{where} has the field {text_field!r} and {form.said} ({form.shown}), and the text is "
        f"read, all of which is learned; --data.form {form.name} reads the conversations, "
        "--data.form text says that the text is meant"
    ]


def _judged(row: dict[str, object], where: str) -> list[str]:
    """Return a warning if a row says whether its answer is a good one; else an empty list."""
    if (key := judgement_in(row)) is None:
        return []
    return [
        f"{where} has {key!r}, true or false as in unpaired preferences: its answers are learned "
        "whichever it says; write the good ones to a file of their own"
    ]


def _keys(row: dict[str, object]) -> list[str]:
    return [key for key, value in row.items() if value is not None]
