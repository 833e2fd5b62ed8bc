"""An answer as its reader finds it: reasoning, content and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from pentameter.generation.stop_texts import n_begun


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: str
    """The arguments, a text that should be a JSON object."""
    id: str | None = None
    """The id that the model wrote; None if its family writes none."""


@dataclass(frozen=True)
class Said:
    """The parts of an answer so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


class Reads(Protocol):
    """Protocol for what reads a family's answers."""

    def read(self, text: str, *, is_whole: bool) -> Said:
        """Return what `text`, an answer, says. Unless `is_whole`, the text is the beginning of an
        answer, and what is returned stays the beginning of what the whole answer says: text whose
        meaning depends on what follows is left out."""


class MalformedError(Exception):
    """Raised for a text that is no call, whatever may follow it."""


class IncompleteError(Exception):
    """Raised for a text that may become a call with what follows it."""


def read_json(text: str, start: int, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
    """Return (value, end): the JSON object or list (`kind`) in `text` at `start`, after white
    space, and the index behind it. Raises IncompleteError if the text ends before it does, and
    MalformedError if it is no such JSON."""
    start = after_space(text, start)
    if start == len(text):
        raise IncompleteError
    if text[start] != ("{" if kind is dict else "["):
        raise MalformedError
    end = _balanced(text, start)
    try:
        value = json.loads(text[start:end])
    except (ValueError, RecursionError) as error:
        raise MalformedError from error
    return value, end


def _balanced(text: str, start: int) -> int:
    """Return the index behind the bracket that closes the one at `start`. Raises IncompleteError if
    there is none."""
    depth, in_string, is_escaped = 0, False, False
    for index in range(start, len(text)):
        each = text[index]
        if in_string:
            in_string = each != '"' or is_escaped
            is_escaped = each == "\\" and not is_escaped
        elif each == '"':
            in_string = True
        elif each in "{[":
            depth += 1
        elif each in "}]":
            depth -= 1
            if depth == 0:
                return index + 1
    raise IncompleteError


def after_space(text: str, start: int) -> int:
    """Return the index of the first visible character in `text` at or after `start`."""
    rest = text[start:]
    return len(text) - len(rest.lstrip())


def call_of(value: Any, key: str) -> Call:
    """Return the call that a JSON object describes: its name under "name", its arguments under
    `key`, or none. Raises MalformedError for anything else."""
    match value:
        case {"name": str(name)} if name:
            arguments = value.get(key, {})
            number = value.get("id")
            written = number if isinstance(number, str) and number else None
            if isinstance(arguments, dict):
                return Call(name, json.dumps(arguments, ensure_ascii=False), written)
    raise MalformedError


def settled(text: str, markers: Collection[str], *, is_whole: bool) -> str:
    """Return `text` without what may turn out to be white space before a marker, or the beginning
    of one, unless `is_whole`."""
    return text if is_whole else text[: len(text) - n_begun(text, markers)].rstrip()
