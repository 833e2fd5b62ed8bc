"""Arguments common to verbs: options that tyro parses, configuration overrides, and a MODEL."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
import sys
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import tyro

from pentameter.config.overrides import split_overrides
from pentameter.errors import ConfigError, either, listed, nearest, printable, terminal_message

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from pentameter.checkpoint.load_model import LoadedModel
    from pentameter.config.schema import Config
    from pentameter.data.sizes import DataSizes

Arguments = TypeVar("Arguments")

TOP_KEYS = ("name", "seed")
"""Configuration keys outside any section."""


def parse(kind: type[Arguments], arguments: Sequence[str], *, verb: str) -> Arguments:
    """Parse `arguments` into `kind`, a dataclass of options.

    `--help` and wrong usage end the process with 0 and 2, like other command-line programs. tyro
    shows a refused argument unchanged, so control characters in its message are escaped here.
    Raises ConfigError for an unknown option.
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
    """Parse like `parse`, and return configuration overrides found among the arguments, too."""
    options = options_of(kind)
    own, overrides = split_overrides(arguments, options)
    for argument in overrides:  # `--n 4` begins an option; `--steps 4` lacks its section
        name = argument.partition("=")[0]
        if name.startswith("--") and _begun(name, options):
            check_options([argument], [*options, *TOP_KEYS], verb=verb)
    return parse(kind, own, verb=verb), overrides


def options_of(kind: type[Any]) -> list[str]:
    """Return option names for the dataclass `kind`, with hyphens and without dashes."""
    names = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            names += [f"{name}.{option}" for option in options_of(hint)]
        elif tyro.conf.Positional not in getattr(hint, "__metadata__", ()):
            names.append(name.replace("_", "-"))
    return [*names, "help"]


def check_options(arguments: Sequence[str], options: Sequence[str], *, verb: str) -> None:
    """Raise ConfigError, with similar options, for the first argument that looks like an option and
    is not in `options`."""
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
    """Return the options that start like `typed`, ignoring dashes."""
    return [option for option in options if option.startswith(typed.lstrip("-").replace("_", "-"))]


def without_options(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a command line without the options `names` (with hyphens and without dashes), each of
    which has a value."""
    kept, rest = [], deque(arguments)
    while rest:
        argument = rest.popleft()
        name, equals, _ = argument.partition("=")
        if not name.startswith("--") or name.removeprefix("--").replace("_", "-") not in names:
            kept.append(argument)
        elif not equals and rest:
            rest.popleft()
    return kept


def load_for_verb(path: Path, device: torch.device) -> LoadedModel:
    """Load the model that a MODEL names; warnings go to stderr."""
    from pentameter.checkpoint.load_model import load_model

    warnings: list[str] = []
    loaded = load_model(path, device=device, warnings=warnings)
    print_warnings(warnings)
    return loaded


def sizes_of_data(config: Config, init_from: Path | None = None) -> DataSizes:
    """Return data sizes for a Plan; a warning about unknown ones goes to stderr."""
    from pentameter.checkpoint.hugging_face.tokenizer_files import gpt2_beside
    from pentameter.data.sizes import data_sizes

    sizes = data_sizes(config, gpt2_beside(config.data.tokenizer, init_from))
    print_warnings([] if sizes.warning is None else [sizes.warning])
    return sizes


def print_warnings(warnings: Iterable[str]) -> None:
    """Print warnings on stderr, a line each."""
    for warning in warnings:
        print(f"pentameter: {terminal_message(warning)}", file=sys.stderr)


def print_tables(parts: Iterable[RenderableType], width: int) -> None:
    """Print rich renderables; lines have `width` characters if the output is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = width
    for part in parts:
        console.print(part)
