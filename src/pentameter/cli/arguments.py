"""How verbs that also take configuration read their arguments: tyro's share, and overrides."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from pentameter.config.overrides import split_overrides
from pentameter.errors import printable

Arguments = TypeVar("Arguments")


def parse(kind: type[Arguments], arguments: Sequence[str], *, verb: str) -> Arguments:
    """`kind` (a dataclass of options) filled from `arguments`.

    `--help` and wrong usage end the process as command-line programs do, with 0 and 2. tyro shows
    an argument that it refuses as it is, so what it says of control characters is escaped here.
    """

    def read() -> Arguments:
        return tyro.cli(kind, args=list(arguments), prog=f"pentameter {verb}")

    if all(argument.isprintable() for argument in arguments):
        return read()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return read()
    finally:
        print(printable(said.getvalue(), keep="\n"), end="", file=sys.stderr)


def parse_arguments(
    kind: type[Arguments], arguments: Sequence[str], *, verb: str
) -> tuple[Arguments, list[str]]:
    """As `parse`, and the overrides of the configuration among the arguments."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind)  # type: ignore[arg-type]
    own, overrides = split_overrides(arguments, {field.name for field in fields} | {"help"})
    return parse(kind, own, verb=verb), overrides
