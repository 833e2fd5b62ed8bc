"""The arguments of verbs: options that tyro reads, overrides of the configuration, and a MODEL."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import tyro

from pentameter.config.overrides import split_overrides
from pentameter.errors import ConfigError, either, listed, nearest, printable, terminal_message

if TYPE_CHECKING:
    import torch

    from pentameter.checkpoint.load_model import LoadedModel

Arguments = TypeVar("Arguments")

TOP_KEYS = ("name", "seed")
"""Keys of a configuration that stand in no section."""


def parse(kind: type[Arguments], arguments: Sequence[str], *, verb: str) -> Arguments:
    """`kind` (a dataclass of options) filled from `arguments`.

    `--help` and wrong usage end the process as command-line programs do, with 0 and 2. tyro shows
    an argument that it refuses as it is, so what it says of control characters is escaped here.
    """

    check_options(arguments, options_of(kind), verb=verb)

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
    options = options_of(kind)
    own, overrides = split_overrides(arguments, options)
    for argument in overrides:  # `--n 4` begins an option; `--steps 4` lacks its section
        name = argument.partition("=")[0]
        if name.startswith("--") and _begun(name, options):
            check_options([argument], [*options, *TOP_KEYS], verb=verb)
    return parse(kind, own, verb=verb), overrides


def options_of(kind: type[Any]) -> list[str]:
    """The names of the options that `kind`, a dataclass, describes, with hyphens and no dashes."""
    names = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            names += [f"{name}.{option}" for option in options_of(hint)]
        elif tyro.conf.Positional not in getattr(hint, "__metadata__", ()):
            names.append(name.replace("_", "-"))
    return [*names, "help"]


def check_options(arguments: Sequence[str], options: Sequence[str], *, verb: str) -> None:
    """Raise ConfigError for the first of `arguments` that looks like an option and is none of
    `options`, with those that it may have been meant to be."""
    for argument in itertools.takewhile(lambda argument: argument != "--", arguments):
        typed = argument.partition("=")[0].replace("_", "-")
        if not re.match("--?[A-Za-z]", typed) or typed == "-h" or typed.lstrip("-") in options:
            continue
        near = _begun(typed, options) or [nearest(typed.lstrip("-"), options) or ""]
        meant = either(f"--{name}" for name in near if name)
        raise ConfigError(
            f"{printable(typed)} is no option of `pentameter {verb}`; "
            + (f"did you mean {meant}?" if meant else f"it has {listed(f'--{o}' for o in options)}")
        )


def _begun(typed: str, options: Sequence[str]) -> list[str]:
    """The options that begin as `typed` does, dashes left out."""
    return [option for option in options if option.startswith(typed.lstrip("-").replace("_", "-"))]


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
