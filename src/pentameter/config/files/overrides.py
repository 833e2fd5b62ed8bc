"""`--section.key value`: overrides on the command line, as text. No pydantic here."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pentameter.config.model.former_keys import present_pairs, present_path
from pentameter.errors import ConfigError


def split_overrides(
    arguments: Sequence[str], own_options: Collection[str]
) -> tuple[list[str], list[str]]:
    """Split a verb's arguments; return (its own, the configuration overrides), each in the order
    given.

    Every option that is not in `own_options` (names without dashes: `{"run-dir", "resume",
    "help"}`) is an override. So one with a forgotten section (`--n-layers 4`) reaches the loader,
    which knows the right path. After `--` everything is the verb's own.
    """
    own_names = {option.replace("_", "-") for option in own_options}
    own: list[str] = []
    overrides: list[str] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument == "--":
            return [*own, *rest], overrides
        name = argument.partition("=")[0].removeprefix("--").replace("_", "-")
        if not argument.startswith("--") or name in own_names:
            own.append(argument)
            continue
        overrides.append(argument)
        if "=" not in argument and rest and not rest[0].startswith("--"):
            overrides.append(rest.popleft())
    return own, overrides


def parse_overrides(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Parse overrides into (dotted path, text) pairs, in order.

    `arguments` holds `--section.key value`, `--section.key=value` or `section.key=value`; hyphens
    in a key are underscores, and a former path becomes the present one. A value may be negative
    (`-3`); one that starts with `--` needs the `=`. An unknown key without a value gets "", as the
    loader will refuse its name. Raises ConfigError for a value without a key, a known key without a
    value, and a key given by both its former and its present name.
    """
    pairs: list[tuple[str, str]] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        name, equals, value = argument.partition("=")
        dashed = name.startswith("--")
        path = name.removeprefix("--").replace("-", "_")
        if not dashed and not equals:
            raise ConfigError(
                f"{argument!r} is no option: write --section.key value, e.g. --train.steps 500"
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                from pentameter.config.fields import leaves

                if present_path(path) not in leaves():  # the loader says which keys there are
                    pairs.append((path, ""))
                    continue
                raise ConfigError(
                    f"{argument} needs a value, e.g. {argument} VALUE "
                    f"({argument}=VALUE where the value starts with --)"
                )
            value = rest.popleft()
        pairs.append((path, value))
    return present_pairs(pairs)


def as_options(settings: Mapping[str, Any]) -> list[str]:
    """Return settings (dotted path → value) as overrides of a command line; None is `none`."""
    return [
        f"--{path}={str(value).lower() if isinstance(value, bool | None) else value}"
        for path, value in settings.items()
    ]
