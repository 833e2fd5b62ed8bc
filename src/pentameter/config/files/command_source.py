"""The configuration that a command line names (a preset, a configuration file, or data to train
on), and files that lie beside the model from which a run begins."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from glob import has_magic
from pathlib import Path
from typing import Any

from pentameter.config.files.load import Overrides, flat_overrides, preset_names, text_name
from pentameter.config.schema import Config
from pentameter.config.urls import is_remote
from pentameter.errors import ConfigError

PRESET_FOR_TEXT = "quickstart"
"""The preset for `train novel.txt`."""

# A TOML file by another name is no text.
_OF_A_CONFIGURATION = re.compile(rb"^(extends *=|\[(model|data|optimizer|train)\])", re.MULTILINE)
_TABLE_OR_REMARK = re.compile(rb"\s*(\[|#|$)")
_KEY = re.compile(rb"\s*[\w.\"'-]+\s*=")
_LOOKED_AT_BYTES = 1 << 16


def configuration_of(
    source: str | Path | Config | None,
    overrides: Overrides,
    own: Callable[[], Path | Config] | None = None,
) -> tuple[str | Path | Config, Overrides]:
    """Return (source, overrides) to pass to `load_config`. If `source` is a configuration, a preset
    or a configuration file, both are returned unchanged.

    If it names data to train on (a file, folder, pattern or URL), that becomes the override
    `data.path`. The source is then what `own` returns, the configuration of the model that the run
    begins from, with a run name made from the data's; without `own` it is the preset `quickstart`.
    If `source` is None, the data is that of the overrides, or the model's.

    Raises ConfigError if `overrides` choose a data set beside `source`, and for neither a source
    nor a model.
    """
    if source is None:
        return _without_source(flat_overrides(overrides), own)
    if isinstance(source, Config):
        return source, overrides
    text = str(source)
    is_elsewhere = is_remote(text) or (has_magic(text) and not os.path.exists(text))
    if text in preset_names() or not (is_elsewhere or is_text(Path(text))):
        return source, overrides
    given = flat_overrides(overrides)
    for key in ("data.path", "data.corpus"):
        if key in given:
            raise ConfigError(
                f"{text} is the text to train on, and --{key} {given[key]} names another; keep one"
            )
    named = {"data.path": text, **given}
    if own is not None:  # the quickstart on that text has the text's own name already
        return own(), {"name": text_name(text, "-tuned"), **named}
    return PRESET_FOR_TEXT, named


def _without_source(
    given: dict[str, Any], own: Callable[[], Path | Config] | None
) -> tuple[Path | Config, Overrides]:
    """Return (source, overrides) for a command line that names none: those of the model that the
    run begins from, with a run name made from the data's. Raises ConfigError without a model or
    data."""
    if own is None:
        raise ConfigError(
            "what to train is not said: give a preset (quickstart, …), a TOML file or a text; or "
            "--init-from MODEL, which has its own configuration"
        )
    data = given.get("data.path") or given.get("data.corpus")
    if not isinstance(data, str):
        raise ConfigError(
            "--init-from MODEL gives the configuration, and no data to train on: add --data.path "
            "FILE"
        )
    return own(), {"name": text_name(data, "-tuned"), **given}


def is_text(path: Path) -> bool:
    """Return whether `path` is data to train on: a file that is no configuration, or a folder that
    holds neither a configuration nor a model. False if it does not exist or cannot be read."""
    try:
        is_folder = path.is_dir()
        if is_folder and any(path.glob("*.safetensors")):
            return False  # a model
        file = path / "config.toml" if is_folder else path
        if not file.is_file():  # to open a pipe would wait
            return is_folder
        if file.suffix.lower() == ".toml" and not is_folder:
            return False
        with file.open("rb") as opened:
            start = opened.read(_LOOKED_AT_BYTES)
        return _OF_A_CONFIGURATION.search(start) is None or not (is_folder or _has_keys(start))
    except (OSError, ValueError):  # unreadable, or a NUL in the name: the loader says so
        return False


def _has_keys(start: bytes) -> bool:
    """Return whether at least half of the lines in `start`, a file's first bytes, are `key =
    value`; tables and remarks do not count. A text may well contain the line `[model]`."""
    lines = [line for line in start.splitlines() if not _TABLE_OR_REMARK.match(line)]
    return 2 * sum(_KEY.match(line) is not None for line in lines) >= len(lines)


def with_tokenizer_beside(config: Config, model: Path | None) -> tuple[Config, list[str]]:
    """Return (config, warnings) for a model whose folder was moved. If `data.tokenizer` is the path
    to a tokenizer.json that is missing, and the folder `model` has one, `data.tokenizer` becomes
    that, with one warning. Otherwise, and if `model` is None, `config` is returned unchanged,
    without warnings."""
    if model is None:
        return config, []
    named, beside = Path(config.data.tokenizer), model / "tokenizer.json"
    if named.name != beside.name or os.path.exists(named) or not os.path.exists(beside):
        return config, []
    warning = f"{config.data.tokenizer} is not there; taking {beside}"
    return config.updated({"data.tokenizer": str(beside)}), [warning]


def random_weights(source: Path) -> list[str]:
    """Return a warning if `source` is a checkpoint's config.toml, as a run from it begins with
    random weights unless --init-from names them; else an empty list."""
    folder = source.parent
    if source.name != "config.toml" or not (folder / "manifest.json").is_file():
        return []
    return [
        f"{source} lies beside a model, and a new run begins with random weights; "
        f"--init-from {folder} begins with that model's"
    ]
