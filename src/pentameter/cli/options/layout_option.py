"""The option `--layout`, translated into `[parallel]` overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pentameter.config.schema import Config

BEST = "best"
"""The value of `--layout` for which a search chooses the layout."""


def layout_overrides(layout: str | None) -> list[str]:
    """Return `--layout`'s value as overrides, `--parallel.KEY=VALUE` for every degree; an empty
    list for None. For `best`, return a placeholder (ZeRO stage 1) that passes the checks on any
    configuration: the search replaces it later."""
    from pentameter.planning.layouts.layout import NOT_OF_A_LAYOUT, parse_parallel

    if layout is None:
        return []
    if layout == BEST:
        return ["--parallel.zero=1"]
    chosen = parse_parallel(layout, also=[BEST]).model_dump(exclude=set(NOT_OF_A_LAYOUT))
    return options({f"parallel.{name}": value for name, value in chosen.items()})


def layout_options(config: Config) -> list[str]:
    """Return command-line options that state a configuration's layout, micro-batch size and
    activation checkpointing."""
    parallel = config.parallel
    values = {f"parallel.{name}": value for name, value in parallel.model_dump().items()}
    for name in ("micro_batch_size", "activation_checkpoint"):
        values[f"train.{name}"] = getattr(config.train, name)
    return options(values)


def options(values: Mapping[str, Any]) -> list[str]:
    """Return settings (dotted path → value) as command-line options, None as `none`."""
    return [
        f"--{key}={'none' if value is None else str(value).lower()}"
        for key, value in values.items()
    ]
