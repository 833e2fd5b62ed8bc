"""`pentameter completion`: completes commands in a shell, and configurations in an editor."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from pentameter.cli.options.arguments import options_of, parse

WORDS = "--words"
"""The option with which a shell script asks for completions; the words typed so far follow it, the
last one unfinished."""

SHELLS = ("bash", "zsh", "fish")
"""Shells with a script in the folder `scripts`, which asks with WORDS. A shell completes file names
itself where the command names nothing. Sections of the configuration, which end in a point, get no
space after them."""

OVERRIDING = ("train", "plan", "verify", "eval")
"""Verbs that take configuration keys as options."""
NAMING_PRESETS = ("train", "plan", "verify")


@dataclass(frozen=True)
class CompletionArguments:
    """Print what completes pentameter's commands in a shell, or its configurations in an editor.

    bash: pentameter completion bash >> ~/.bashrc. zsh: … zsh > a file _pentameter in a folder of
    $fpath. fish: … fish > ~/.config/fish/completions/pentameter.fish. toml: the JSON schema of a
    configuration, which editors read that know TOML: … toml > pentameter.schema.json, and the
    first line of the configuration is `#:schema pentameter.schema.json`.
    """

    kind: Annotated[
        Literal["bash", "zsh", "fish", "toml"], tyro.conf.Positional, tyro.conf.arg(metavar="KIND")
    ]
    """bash, zsh or fish: a script; toml: a JSON schema."""


def run(arguments: list[str]) -> int:
    """Print the script or the schema that `arguments` (the command line after the verb) ask for or,
    when a shell asks with WORDS, the candidates; return the exit code 0."""
    if arguments[:1] == [WORDS]:
        print("\n".join(candidates(arguments[1:])))
        return 0
    asked = parse(CompletionArguments, arguments, verb="completion")
    if asked.kind == "toml":
        from pentameter.config.files.write import json_schema

        print(json.dumps(json_schema(), indent=1, ensure_ascii=False))
    else:
        script = resources.files("pentameter.cli") / "scripts" / f"pentameter.{asked.kind}"
        sys.stdout.write(script.read_text(encoding="utf-8"))
    return 0


def candidates(words: Sequence[str]) -> list[str]:
    """Return completions for the last word in `words`, which are typed after `pentameter`; an empty
    list if a file name belongs there, or if there are none."""
    from pentameter.cli.main import VERBS

    *before, typed = words or [""]
    if not before:
        return _beginning(typed, VERBS)
    verb = before[0]
    if verb not in VERBS:
        return []
    name, equals, value = typed.partition("=")
    if equals:
        return [f"{name}={each}" for each in _beginning(value, _values(verb, name))]
    if before[-1].startswith("--") and (values := _values(verb, before[-1])):
        return _beginning(typed, values)
    if typed.startswith("-"):
        return _beginning(typed, _options(verb, typed))
    named = [word for word in before[1:] if not word.startswith("-")]
    return [] if named else _beginning(typed, _positionals(verb))


def _beginning(typed: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(typed)]


def _arguments_of(verb: str) -> type[Any]:
    """Return the dataclass of a verb's options."""
    from pentameter.cli.main import module_of

    kind: type[Any] = getattr(module_of(verb), f"{verb.title()}Arguments")
    return kind


def _options(verb: str, typed: str) -> list[str]:
    """Return a verb's options with dashes, and configuration keys if it takes them: only their
    sections until `typed` contains a point."""
    found = [f"--{name}" for name in options_of(_arguments_of(verb))]
    if verb in OVERRIDING:
        from pentameter.config.fields import leaves

        keys = [f"--{path}" for path in leaves()]
        if "." not in typed:
            keys = list(dict.fromkeys(key.split(".")[0] + "." * ("." in key) for key in keys))
        typed_hyphens = "-" in typed.partition(".")[2]
        found += [key.replace("_", "-") for key in keys] if typed_hyphens else keys
    return found


def _values(verb: str, option: str) -> list[str]:
    """Return the words that an option (with dashes) accepts; none if its value is a number, a text
    or a file."""
    name = option.removeprefix("--").replace("-", "_")
    hint = get_type_hints(_arguments_of(verb)).get(name)
    if get_origin(hint) is Literal:
        return [str(each) for each in get_args(hint)]
    if verb not in OVERRIDING:
        return []
    from pentameter.config.fields import choices_of, leaves

    if (leaf := leaves().get(name)) is None:
        return []
    words = [str(each) for option in leaf.options for each in choices_of(option)]
    kinds = {option.get("type") for option in leaf.options}
    return [
        *words,
        *(["true", "false"] if "boolean" in kinds else []),
        *(["none"] if "null" in kinds and words else []),
    ]


def _positionals(verb: str) -> list[str]:
    """Return completions for a verb's first argument, besides files: presets, run folders or
    shells."""
    if verb in NAMING_PRESETS:
        from pentameter.config.files.load import preset_names

        return preset_names()
    if verb == "completion":
        return [*SHELLS, "toml"]
    return [str(path) for path in sorted(Path("runs").glob("*/")) if verb != "prepare"]
