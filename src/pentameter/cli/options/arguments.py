"""Arguments common to verbs (`train`, `plan`, …): options parsed by tyro, configuration overrides,
the MODEL that a verb reads, and the first line, said before the seconds that reading takes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import glob
import io
import itertools
import os
import re
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import tyro

from pentameter.config.choices import LoadedPrecision
from pentameter.config.files.overrides import split_overrides
from pentameter.config.urls import given_path
from pentameter.errors import ConfigError, either, listed, nearest, printable, remark
from pentameter.machine.load.idle_threads import prepare_threads
from pentameter.processes.group.rank import find_rank
from pentameter.processes.standard_streams import outlived

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from pentameter.checkpoint.folders.load_model import LoadedModel
    from pentameter.config.schema import Config
    from pentameter.data.sizes import DataSizes

Arguments = TypeVar("Arguments")

TOP_KEYS = ("name", "seed")
"""Configuration keys outside any section."""

FIRST_LINES = {
    "train": "reading {source} …",
    "sample": "reading the model {model} …",
    "serve": "reading the model {models} …",
    "eval": "reading the model {model} …",
    "prepare": "reading {source} …",
    "export": "reading the model {model} …",
    "import": "reading the model {source} …",
    "plan": "reading {source} …",
    "verify": "reading {source} …",
    "data": "reading step {step} of {run_dir} …",
    "replay": "reading step {step} of {run_dir} …",
    "report": "reading the run {run_dir} …",
    "compare": "reading the runs {runs} …",
    "watch": "reading the runs in {runs} …",
    "doctor": "looking at this machine …",
}
"""Verb → the line, with the names of options in braces. A verb that answers at once has none."""
LINES_WITHOUT_A_SOURCE = {"train": "reading the model {init_from} …"}
"""Verb → its line where `source` is None: the configuration is then that of a model."""
MOST_NAMED = 3
"""Most models, runs or files that a first line names."""


def parse(kind: type[Arguments], arguments: Sequence[str], *, verb: str) -> Arguments:
    """Parse a verb's command line into `kind`, a dataclass of options, and print the verb's first
    line (`begin`).

    `--help` and wrong usage end the process with 0 and 2, like other command-line programs. Control
    characters in a refused argument are escaped, as tyro prints it unchanged. In paths a `~` that a
    shell has not seen stands for the home folder. Raises ConfigError for an unknown option.
    """

    check_options(arguments, options_of(kind), verb=verb)

    def read() -> Arguments:
        return tyro.cli(kind, args=list(arguments), prog=f"pentameter {verb}")

    if all(argument.isprintable() for argument in arguments):
        parsed = _with_given_paths(read())
    else:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parsed = _with_given_paths(read())
        finally:
            print(printable(said.getvalue(), keep="\n"), end="", file=sys.stderr)
    begin(verb, parsed)
    return parsed


def _with_given_paths(parsed: Arguments) -> Arguments:
    """Return the options with `given_path` applied to each path among them. These are the options
    of type Path, a verb's first argument, and --resume, which may be a checkpoint."""
    changed: dict[str, Any] = {}
    for name, hint in get_type_hints(type(parsed), include_extras=True).items():
        value = getattr(parsed, name)
        may_be = tyro.conf.Positional in getattr(hint, "__metadata__", ()) or name == "resume"
        values = value if isinstance(value, tuple) else (value,)
        if any(isinstance(each, Path) or (may_be and isinstance(each, str)) for each in values):
            given = tuple(type(each)(given_path(str(each))) for each in values)
            changed[name] = given if isinstance(value, tuple) else given[0]
    return dataclasses.replace(parsed, **changed)  # type: ignore[type-var]


def begin(verb: str, asked: object) -> None:
    """Print the first line of `verb`, whose options are `asked`, on stderr, and choose how this
    process's threads wait, which torch reads when it is imported.

    Where torch is imported already, as in a rank that was forked, nobody waits, and nothing is
    done. A rank that a launcher started prints nothing unless it is the first, and never if the
    launcher is this program, which has said it.
    """
    if "torch" in sys.modules:
        return
    line = first_line(verb, asked)
    if line is not None and _speaks():
        with outlived():  # a training that began without a reader goes on
            remark(line)
    prepare_threads()


def first_line(verb: str, asked: object) -> str | None:
    """Return the first line of `verb` for its options; None if it has none, or if nothing is named
    that it could read."""
    if verb not in FIRST_LINES:
        return None
    options = {name: _named(value) for name, value in vars(asked).items()}
    line = FIRST_LINES[verb]
    if verb in LINES_WITHOUT_A_SOURCE and not options["source"]:
        line = LINES_WITHOUT_A_SOURCE[verb]
    if any(f"{{{name}}}" in line and not text for name, text in options.items()):
        return None
    return line.format_map(options)


def _named(value: Any) -> str:
    if value is None:
        return ""
    values = value if isinstance(value, tuple) else (value,)
    more = f" and {len(values) - MOST_NAMED} more" if len(values) > MOST_NAMED else ""
    return listed(values[:MOST_NAMED]) + more


def _speaks() -> bool:
    """Return True if this process is the one of a group that prints."""
    try:
        launched = find_rank()
    except ConfigError:  # raised again by the verbs that train together
        return False
    return launched is None or (launched.rank == 0 and launched.source != "--nproc")


def parse_arguments(
    kind: type[Arguments], arguments: Sequence[str], *, verb: str
) -> tuple[Arguments, list[str]]:
    """Parse a verb's command line into `kind`, a dataclass of options, and the configuration
    overrides among them (`--section.key value`), still as text.

    Files that a shell listed for a pattern become that pattern again (`with_patterns`). `--help`
    and wrong usage end the process with 0 and 2. Raises ConfigError for an unknown option.
    """
    options = options_of(kind)
    arguments = with_patterns(arguments)
    own, overrides = split_overrides(arguments, options)
    for argument in overrides:  # `--n 4` begins an option; `--steps 4` lacks its section
        name = argument.partition("=")[0]
        if name.startswith("--") and _begun(name, options):
            check_options([argument], [*options, *TOP_KEYS], verb=verb)
    return parse(kind, own, verb=verb), overrides


def with_patterns(arguments: Sequence[str]) -> list[str]:
    """Replace files that a shell listed for a pattern by that pattern: `--data.path
    corpus/0.parquet corpus/1.parquet` becomes `--data.path corpus/*.parquet`. Two or more arguments
    in a row count as listed if they are existing files in one folder with the same suffix (not
    .toml). Raises ConfigError if no pattern with one `*` matches these files and no others."""
    found: list[str] = []
    for _, group in itertools.groupby(arguments, key=_listed_kind):
        listed_files = list(group)
        if len(listed_files) < 2 or _listed_kind(listed_files[0]) is None:
            found += listed_files
            continue
        start = os.path.commonprefix(listed_files)  # noqa: RUF071 - characters, not folders
        rests = [file.removeprefix(start)[::-1] for file in listed_files]
        end = os.path.commonprefix(rests)[::-1]  # noqa: RUF071
        pattern = f"{glob.escape(start)}*{glob.escape(end)}"
        if sorted(glob.glob(pattern)) != sorted(listed_files):
            raise ConfigError(
                f"{listed_files[0]} and {len(listed_files) - 1:,} more files are given where one "
                "value belongs; write the pattern in quotes, so that the shell leaves it: "
                f"'{start}*{end}'"
            )
        found.append(pattern)
    return found


def _listed_kind(argument: str) -> tuple[str, str] | None:
    """Return (folder, suffix) if the argument is an existing file that a shell may have listed (it
    has a suffix other than .toml), else None."""
    path = Path(argument)
    if argument.startswith("-") or not path.suffix or path.suffix.lower() == ".toml":
        return None
    try:
        return (str(path.parent), path.suffix) if path.is_file() else None
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        return None


def options_of(kind: type[Any]) -> list[str]:
    """Return the option names in the dataclass `kind`, with hyphens and without dashes, and
    "help"."""
    names = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            names += [f"{name}.{option}" for option in options_of(hint)]
        elif tyro.conf.Positional not in getattr(hint, "__metadata__", ()):
            names.append(name.replace("_", "-"))
    return [*names, "help"]


def check_options(arguments: Sequence[str], options: Sequence[str], *, verb: str) -> None:
    """Raise ConfigError for the first argument that looks like an option and is not in `options`
    (names without dashes); the message has similar ones."""
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


def check_least(parsed: object, **least: float) -> None:
    """Raise ConfigError if an option is below its least value, or NaN; the first one in `least`
    (option's name in `parsed` → least value). Options that are None are skipped."""
    for name, smallest in least.items():
        value = getattr(parsed, name)
        if value is not None and not value >= smallest:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {value} must be at least {smallest}")


def _begun(typed: str, options: Sequence[str]) -> list[str]:
    """Return the options that begin with `typed`; neither has dashes in front."""
    return [option for option in options if option.startswith(typed.lstrip("-").replace("_", "-"))]


def without_options(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a command line without the options `names` (with hyphens, without dashes) and their
    values, whether written `--name value` or `--name=value`."""
    kept, rest = [], deque(arguments)
    while rest:
        argument = rest.popleft()
        name, equals, _ = argument.partition("=")
        if not name.startswith("--") or name.removeprefix("--").replace("_", "-") not in names:
            kept.append(argument)
        elif not equals and rest:
            rest.popleft()
    return kept


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Context manager for the imports of torch and of what needs it: they make a million objects
    that stay, and Python's collector, which is off inside, would look through all of them, several
    times then, and now and then later."""
    is_first, was_enabled = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_first:  # else there may be models, too
            gc.freeze()
        if was_enabled:
            gc.enable()


def device_for_verb(name: str) -> torch.device:
    """Return the device that `--device` names; if `auto` takes the CPU though there is a GPU, print
    the reason on stderr."""
    with importing():
        from pentameter.machine.capabilities import machine_capabilities
        from pentameter.machine.choices import choose_device

    capabilities = machine_capabilities()
    device = choose_device(name, capabilities)
    if name == "auto" and device.type == "cpu" and capabilities.gpu_obstacle is not None:
        remark(capabilities.gpu_obstacle)
    return device


def load_for_verb(
    path: Path, device: torch.device, precision: LoadedPrecision = "weights"
) -> LoadedModel:
    """Load the model in a run, checkpoint or Hugging Face folder onto `device`, its weights in
    `precision` (`load_model`); print warnings on stderr."""
    with importing():
        from pentameter.checkpoint.folders.load_model import load_model

    warnings: list[str] = []
    loaded = load_model(path, device=device, precision=precision, warnings=warnings)
    remark(*warnings)
    return loaded


def sizes_of_data(config: Config, init_from: Path | None = None) -> DataSizes:
    """Return the vocabulary size and rows per epoch for planning a run; print a warning on stderr
    if they are not known yet. init_from: the model that the run begins with, None for none; GPT-2's
    tokenizer is taken from its folder if it is needed and lies there."""
    from pentameter.checkpoint.hugging_face.tokenizer_files import gpt2_beside
    from pentameter.data.sizes import data_sizes

    sizes = data_sizes(config, gpt2_beside(config.data.tokenizer, init_from))
    if sizes.warning is not None:
        remark(sizes.warning)
    return sizes


def print_tables(parts: Iterable[RenderableType], width: int) -> None:
    """Print rich renderables. Lines are as wide as the terminal, or `width` characters if the
    output is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = width
    for part in parts:
        console.print(part)
