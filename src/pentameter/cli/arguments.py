"""How verbs that also take configuration read their arguments: tyro's share, and overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from pentameter.config.overrides import split_overrides

Arguments = TypeVar("Arguments")


def parse_arguments(
    kind: type[Arguments], arguments: Sequence[str], *, verb: str
) -> tuple[Arguments, list[str]]:
    """`kind` (a dataclass of options) filled from `arguments`, and the overrides among them.

    `--help` and wrong usage end the process as command-line programs do, with 0 and 2.
    """
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind)  # type: ignore[arg-type]
    own, overrides = split_overrides(arguments, {field.name for field in fields} | {"help"})
    return tyro.cli(kind, args=own, prog=f"pentameter {verb}"), overrides
