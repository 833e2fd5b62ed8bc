"""The arguments of verbs: options that tyro reads, overrides of the configuration, and a MODEL."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tyro

from pentameter.config.overrides import split_overrides
from pentameter.errors import printable, terminal_message

if TYPE_CHECKING:
    import torch

    from pentameter.checkpoint.load_model import LoadedModel

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
    """`kind` filled as by `parse`, and the overrides of the configuration among the arguments."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind)  # type: ignore[arg-type]
    own, overrides = split_overrides(arguments, {field.name for field in fields} | {"help"})
    return parse(kind, own, verb=verb), overrides


def load_for_verb(path: Path, device: torch.device) -> LoadedModel:
    """The model that a MODEL names; what was passed over or left out goes to stderr."""
    from pentameter.checkpoint.load_model import load_model

    warnings: list[str] = []
    loaded = load_model(path, device=device, warnings=warnings)
    print_warnings(warnings)
    return loaded


def print_warnings(warnings: Iterable[str]) -> None:
    """Print warnings on stderr, a line each."""
    for warning in warnings:
        print(f"pentameter: {terminal_message(warning)}", file=sys.stderr)
