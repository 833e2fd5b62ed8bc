"""Loads a validated `Config` from a preset or TOML file, those that it extends, and overrides.

Layers are merged as plain dicts, oldest first, and validated once at the end.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError

from pentameter.config.fields import (
    leaves,
    nested,
    parse_value,
    takes_whole_number,
    value_in,
    whole_number,
)
from pentameter.config.files.overrides import parse_overrides
from pentameter.config.messages import problems, shown
from pentameter.config.model.former_keys import present_pairs, with_present_keys
from pentameter.config.naming import name_of
from pentameter.config.schema import Config
from pentameter.config.section import ABSENT
from pentameter.config.urls import given_path, is_remote, last_part
from pentameter.errors import ConfigError, near_files, nearest, printable

EXCLUSIVE = (
    ("data", "corpus", "path", "sources"),
    ("train", "batch_size", "tokens_per_step"),
    ("train", "steps", "epochs"),
)
"""(section, keys of which a configuration sets one): `train.steps` or `train.epochs`, for example.
If a layer sets one of them, `merge` drops the others from the layers below it."""

BOUND_TO_TEXT = (
    "name",
    "data.max_bytes",
    "data.validation_path",
    "data.test_path",
    "data.text_field",
    "data.form",
    "data.bad_rows",
    "data.encoding",
    "data.chat_template",
    "data.grammar",
    "train.sample_prompt",
)
"""Keys and sections that suit one data set only, such as its template or its field with the text.
If a layer chooses another data set, `merge` drops those of the layers below it."""

PATIENCE = "train.patience"
"""The key that counts evaluations. If a layer switches evaluations off, `merge` drops it from the
layers below."""

MIXTURE_NAME = "blend"
"""The run's name if several data sets replace a preset's."""

LARGEST_FILE_BYTES = 2**20
"""Largest configuration file read; a larger one was named by mistake."""

DEEPEST = 32
"""Most parts in a dotted key, and most levels of tables and lists. The schema has three."""

_PART = rb"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+"""
_TOO_DEEP = re.compile(
    rb"(?:^|[\[{,])[ \t]*+(?:%s\.[ \t]*+){%d}" % (_PART, DEEPEST), flags=re.MULTILINE
)
"""Matches a dotted key with more than DEEPEST parts, which tomllib reads in quadratic time and
memory."""

Tree = dict[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]
"""Values on top of a configuration: a command line's list, or a mapping, nested or with dotted
keys."""


def load_config(source: str | Path | Config, overrides: Overrides = ()) -> Config:
    """Load a configuration. `source` is a preset's name, a TOML file or another Config; `overrides`
    replace single values in it.

    A preset or file may say `extends = "preset-or-file"` (a file relative to the one that names
    it). `overrides` is a list from a command line (`["--train.steps", "500"]`), or a mapping,
    nested or with dotted keys. Raises ConfigError naming every problem at once.
    """
    tree = source.model_dump() if isinstance(source, Config) else _read_chain(source)
    label = source.name if isinstance(source, Config) else str(source)
    layer, unknown = _override_tree(overrides)
    tree = merge(tree, layer)
    for name in ("data", "train"):  # absent ones fail with the validator's advice, not "missing"
        tree.setdefault(name, {})
    for leaf in filter(takes_whole_number, leaves().values()):
        table = value_in(tree, leaf.section) if leaf.section else tree
        if isinstance(table, dict) and leaf.key in table:  # TOML writes 10000 as 1e4 too
            table[leaf.key] = whole_number(table[leaf.key])
    refused: ValidationError | None = None
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        refused = error
    if refused is None and not unknown:
        return config
    sentences, n_problems = problems(refused, tree, unknown)
    if n_problems == 1:
        raise ConfigError(f"{printable(label)}: {sentences[0]}")
    lines = "".join(f"\n  {sentence}" for sentence in sentences)
    raise ConfigError(f"{printable(label)}: {n_problems:,} problems{lines}")


def preset_names() -> list[str]:
    """Return the names of the presets that ship with the package, sorted."""
    files = (resources.files("pentameter.config") / "presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def merge(base: Tree, layer: Tree) -> Tree:
    """Return a new configuration tree (nested dicts): `base` with the values in `layer` over it.
    Neither is changed. Three rules concern values in `base`:

    - If `layer` sets a key in EXCLUSIVE, such as `train.epochs`, its alternatives are dropped.
    - If `layer` switches evaluations off, `train.patience` is dropped.
    - If `layer` chooses another data set (`data.corpus`, `path` or `sources`), the keys in
      BOUND_TO_TEXT, which described the old one, are dropped, and the run is named after the new
      one. Under its old name it would be refused, as another run in the same folder.
    """
    old, new = _text_of(base), _text_of(layer)
    if old is not None and new not in (None, old):
        name = text_name(new[1]) if isinstance(new[1], str) else MIXTURE_NAME
        base = {**_without(base, BOUND_TO_TEXT), "name": name}
    merged = _merge_keys(base, layer)
    if _evaluates(base) and not _evaluates(merged) and value_in(layer, PATIENCE) is None:
        merged = _without(merged, [PATIENCE])
    for section, *keys in EXCLUSIVE:
        chosen, result = layer.get(section), merged.get(section)
        if not isinstance(chosen, dict) or not isinstance(result, dict):
            continue
        for key, other in itertools.permutations(keys, 2):
            if chosen.get(key, ABSENT) not in (None, ABSENT, [], ()) and other not in chosen:
                result.pop(other, None)
    return merged


def _evaluates(tree: Tree) -> bool:
    """Return whether a run with the configuration `tree` evaluates: its interval is not switched
    off, and there is a validation split."""
    train = tree.get("train")
    if isinstance(train, dict) and train.get("eval_interval", "auto") in (None, ABSENT):
        return False
    has_path = value_in(tree, "data.validation_path") not in (None, ABSENT)
    return has_path or value_in(tree, "data.validation_fraction") != 0


def text_name(text: str, suffix: str = "") -> str:
    """Return a run's name made from its data set's, `text`: a corpus's name, a path or a URL. It is
    the last part up to its first dot (`novel` for `texts/novel.txt.gz`), for `corpus/*.parquet` the
    folder's name, and then `suffix`."""
    if is_remote(text):
        text = last_part(text)
    path = PurePath(text)
    if path.name.startswith("*"):  # a pattern: corpus/*.parquet
        path = path.parent
    return name_of(path.name.partition(".")[0], suffix)  # also of novel.txt.gz


def _text_of(tree: Tree) -> tuple[str, Any] | None:
    """Return (key, value) by which the configuration `tree` chooses its data set, the key being
    `corpus`, `path` or `sources` in [data]; None if it chooses none."""
    section, *keys = EXCLUSIVE[0]
    for key in keys:
        value = value_in(tree, f"{section}.{key}")
        if isinstance(value, str | list | tuple) and value and value != ABSENT:
            return key, value
    return None


def _without(tree: Tree, paths: Sequence[str], prefix: str = "") -> Tree:
    """Return a copy of `tree`, nested dicts, without the keys and sections at the dotted `paths`.
    `prefix` is put before each key to get its path."""
    return {
        key: _without(value, paths, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in tree.items()
        if f"{prefix}{key}" not in paths
    }


def _merge_keys(base: Tree, layer: Tree) -> Tree:
    merged = dict(base)
    for key, value in layer.items():
        if isinstance(value, dict):
            below = merged.get(key)
            merged[key] = _merge_keys(below if isinstance(below, dict) else {}, value)
        else:
            merged[key] = value
    return merged


# Sources: presets, files and what they extend


def _read_chain(source: str | Path) -> Tree:
    """Read `source`, a preset's name or a file, and everything that it extends, and return them
    merged, nearer ones over farther ones. Raises ConfigError if one cannot be read or they extend
    each other in a circle."""
    layers: list[Tree] = []
    labels: dict[str, str] = {}  # location → how messages call it, in the order of extension
    folder, named_by = Path(), ""
    while True:
        location, label, text = _read_source(source, folder, named_by)
        if location in labels:
            circle = [*list(labels.values())[list(labels).index(location) :], labels[location]]
            raise ConfigError(f"extends runs in a circle: {' extends '.join(circle)}")
        labels[location] = label
        layer = parse_config(text, label)
        parent = layer.pop("extends", None)
        layers.append(layer)
        if parent is None:
            break
        if not isinstance(parent, str) or not parent:
            raise ConfigError(
                f"{label}: extends={shown(parent)} must be the name of a preset or a file"
            )
        source, folder, named_by = parent, Path(location).parent, f"{label}: extends: "
    tree: Tree = {}
    for layer in reversed(layers):
        tree = merge(tree, layer)
    return tree


def _read_source(source: str | Path, folder: Path, named_by: str) -> tuple[str, str, bytes]:
    """Read a preset, or a file relative to `folder`. Return (location, name for messages, bytes).
    `named_by` begins error messages: it names the file that extends this one, and is empty if none
    does. Raises ConfigError if it cannot be read."""
    name = str(source)
    if not name:
        raise ConfigError(f"{named_by}name a preset ({', '.join(preset_names())}) or a TOML file")
    if isinstance(source, str) and name in preset_names():
        preset = resources.files("pentameter.config") / "presets" / f"{name}.toml"
        return f"preset {name}", f"preset {name}", preset.read_bytes()
    label = printable(name)
    path = folder / given_path(name)
    with config_errors(f"{named_by}{label}"):
        try:
            if path.is_dir():
                raise ConfigError(f"{named_by}{label} is a folder; {_configuration_in(path)}")
            text = read_small_file(
                path, f"{named_by}{label}"
            )  # first: of a loop of symlinks it says
            return str(path.resolve()), label, text
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{named_by}{_not_found(path, label)}") from None


@contextmanager
def config_errors(label: str) -> Iterator[None]:
    """Context manager for reading a file that a user has named: an OSError or ValueError in its
    body becomes a ConfigError whose message begins with `label`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{label} cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL or a lone surrogate
        raise ConfigError(f"{label} cannot be the name of a file") from None


def _configuration_in(folder: Path) -> str:
    """Return a hint how to get a configuration from a folder, for an error message."""
    if (folder / "config.toml").is_file():
        return f"its configuration is {printable(str(folder / 'config.toml'))}"
    if (folder / "config.json").is_file():
        return (
            f"`pentameter import {printable(str(folder))} --out DIR` writes the configuration of a "
            "Hugging Face model"
        )
    return "name the .toml file in it"


def read_small_file(path: Path, label: str) -> bytes:
    """Return a regular file's bytes. Raises ConfigError, which begins with `label`, if it is
    another kind of file or larger than LARGEST_FILE_BYTES, and OSError or ValueError if it cannot
    be opened.

    A pipe is opened without waiting for a writer.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{label} is a device or a pipe; name a file")
        text = file.read(LARGEST_FILE_BYTES + 1)
    if len(text) > LARGEST_FILE_BYTES:
        raise ConfigError(
            f"{label} is larger than {LARGEST_FILE_BYTES:,} bytes, and a configuration is not; "
            "name a TOML file"
        )
    return text


def _not_found(path: Path, label: str) -> str:
    said = f"{label} is neither a preset nor a file"
    near = near_files(path)
    is_bare = PurePath(label).name == label and path.suffix in ("", ".toml")
    if not is_bare:  # as the file of a text is called
        return f"{said}{near}"
    presets = preset_names()
    preset = nearest(path.name.removesuffix(".toml"), presets)
    hint = f"; did you mean {preset}?" if preset else near
    return f"{said}{hint}{' ' if hint.endswith('?') else '; '}presets: {', '.join(presets)}"


def parse_config(text: bytes, label: str) -> Tree:
    """Parse a configuration as `parse_toml` does, and move former keys of [model] to their present
    places. Raises ConfigError, also for a key that is given by both names."""
    tree = parse_toml(text, label)
    if isinstance(tree.get("model"), dict):
        try:
            tree["model"] = with_present_keys(tree["model"])
        except ValueError as error:
            raise ConfigError(f"{label}: {error}") from None
    return tree


def parse_toml(text: bytes, label: str) -> Tree:
    """Parse TOML, UTF-8 bytes, into nested dicts. Raises ConfigError, which begins with `label`,
    for invalid TOML and for more than DEEPEST levels."""
    found = _TOO_DEEP.search(text)
    if found is not None:
        line = text[: found.end()].count(b"\n") + 1
        raise ConfigError(f"{label}: line {line}: a key has more than {DEEPEST} dotted parts")
    try:
        tree = tomllib.loads(text.decode("utf-8-sig"))
        if _is_deep(tree):
            raise RecursionError
        return tree
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        raise ConfigError(f"{label}: line {line}: the file is not UTF-8 text") from None
    except RecursionError:
        raise ConfigError(
            f"{label}: values are nested too deeply: more than {DEEPEST} levels"
        ) from None
    except ValueError as error:  # TOMLDecodeError, and what tomllib lets through from int()
        match = re.fullmatch(r"(.*?)\s*\(at (.*)\)", str(error), flags=re.DOTALL)
        reason, position = match.groups() if match else (str(error), "the file")
        raise ConfigError(
            f"{label}: {position}: not valid TOML: {printable(reason)} "
            '(text needs quotes: name = "run")'
        ) from None


def _is_deep(value: Any, n_levels: int = DEEPEST) -> bool:
    """Return True if tables and lists in `value` are nested more than `n_levels` deep."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return n_levels == 0 or any(_is_deep(each, n_levels - 1) for each in inner)


# Overrides


def _override_tree(overrides: Overrides) -> tuple[Tree, list[str]]:
    """Return (overrides as nested dicts, dotted paths that are not in the schema). Text is parsed
    as the key's type; other values stay as they are."""
    known: dict[str, Any] = {}
    unknown: list[str] = []
    for path, value in flat_overrides(overrides).items():
        leaf = leaves().get(path)
        if leaf is None:
            unknown.append(path)
            continue
        known[path] = parse_value(leaf, value) if isinstance(value, str) else value
    return nested(known), unknown


def flat_overrides(overrides: Overrides) -> dict[str, Any]:
    """Return overrides as dotted path → value; values from a command line are text. Raises
    ConfigError for an argument that is no option, and for a key given by both its former and its
    present name."""
    if isinstance(overrides, str):
        raise TypeError("overrides must be a list of arguments, not one string")
    if not isinstance(overrides, Mapping):
        return dict(parse_overrides(overrides))
    return dict(present_pairs(list(_pairs(overrides, ""))))


def _pairs(overrides: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for each value in `overrides`, nested or with dotted keys;
    `prefix` is put before each path."""
    for key, value in overrides.items():
        path = f"{prefix}{key}".replace("-", "_")
        if isinstance(value, Mapping) and path not in leaves():
            yield from _pairs(value, f"{path}.")
        else:
            yield path, value
