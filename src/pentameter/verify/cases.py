"""Cases that are compared with one process: layouts, and settings of how a step is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pentameter.config.schema import Config, ParallelConfig
from pentameter.errors import ConfigError
from pentameter.planning.layout import Layout, check_layout, make_layout, parse_layout

MOST_PROCESSES = 8
"""Processes of a configuration's own layout: a larger one is verified at lower degrees."""

MOST_PROCESSES_ASKED = 64
"""Processes of a layout that somebody asks for; they all run on this machine."""

SETTINGS = {
    "micro_batches": "in 1 … 64",
    "activation_checkpoint": "full or selective",
    "tied_head": "true or false",
}
"""Settings that a case may have beside its layout, and what each must be."""

Recompute = Literal["full", "selective"]

LAYOUTS = (
    "data=1,micro_batches=4",
    "data=1,activation_checkpoint=full",
    "data=1,activation_checkpoint=selective",
    "data=2",
    "data=2,zero=1",
    "data=2,zero=2",
    "data=2,zero=3",
    "data=2,zero=3,activation_checkpoint=full",
    "data=4,zero=3,replicate=2",
    "tensor=2",
    "tensor=2,sequence=1",
    "pipeline=2,schedule=gpipe",
    "pipeline=2",
    "pipeline=2,micro_batches=2",
    "pipeline=2,schedule=zero-bubble",
    "pipeline=2,schedule=interleaved,virtual_stages=2",
    "pipeline=2,schedule=zero-bubble,virtual_stages=2",
    "data=2,tensor=2",
    "data=2,zero=2,tensor=2",
    "data=4,zero=3,replicate=2,tensor=2",
    "data=2,pipeline=2",
    "data=2,zero=3,pipeline=2",
    "data=2,zero=2,pipeline=2,schedule=zero-bubble",
    "tensor=2,pipeline=2",
    "tensor=2,sequence=1,pipeline=2,activation_checkpoint=selective",
    "data=2,tensor=2,pipeline=2",
    "data=2,zero=3,tensor=2,sequence=1,pipeline=2,schedule=interleaved,virtual_stages=2",
)
"""The cases of `--layouts all`, as they are written, but for the other kind of head."""

WITH_OTHER_HEAD = ("tensor=2", "pipeline=2", "tensor=2,pipeline=2", "data=2,tensor=2,pipeline=2")
"""Layouts that are verified again with a head that is tied where the configuration's is not, or the
other way round: a head is shared out by tensor, and tied across stages by pipeline."""


@dataclass(frozen=True)
class Case:
    """A layout and, where one is given, a setting that must not change the result either."""

    layout: Layout
    micro_batches: int | None = None
    """For each part of the data; when absent two, or two for each process of a pipeline."""
    activation_checkpoint: Recompute | None = None
    tied_head: bool | None = None
    """Instead of the configuration's. The one process that it is compared with has it too."""

    @property
    def n_micro_batches(self) -> int:
        """Micro-batches of a step, for each part of the data: several, but in one process alone."""
        if self.micro_batches is not None:
            return self.micro_batches
        if self.layout.pipeline > 1:
            return 2 * self.layout.pipeline
        return 2 if self.layout.world_size > 1 else 1

    def __str__(self) -> str:
        """Its text on the command line."""
        own = {
            "micro_batches": self.micro_batches,
            "activation_checkpoint": self.activation_checkpoint,
            "tied_head": None if self.tied_head is None else str(self.tied_head).lower(),
        }
        return ",".join([str(self.layout), *(f"{k}={v}" for k, v in own.items() if v is not None)])

    @property
    def name(self) -> str:
        """Its name in a table for people."""
        layout = self.layout
        parts = []
        if layout.data > 1 or layout.zero:
            copies = f", {layout.replicate} copies" if layout.replicate > 1 else ""
            zero = f" (ZeRO {layout.zero}{copies})" if layout.zero else ""
            parts.append(f"data {layout.data}{zero}")
        if layout.tensor > 1:
            parts.append(f"tensor {layout.tensor}{' (sequence)' if layout.sequence else ''}")
        if layout.pipeline > 1:
            virtual = f" × {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
            parts.append(f"pipeline {layout.pipeline}{virtual} ({layout.schedule})")
        settings = [" × ".join(parts) or "one process"]
        if self.micro_batches is not None:
            settings.append(f"{self.micro_batches} micro-batches")
        if self.activation_checkpoint is not None:
            settings.append(f"checkpointing {self.activation_checkpoint}")
        if self.tied_head is not None:
            settings.append("tied head" if self.tied_head else "untied head")
        return ", ".join(settings)


def chosen_cases(config: Config, text: str) -> list[Case]:
    """The cases that `--layouts` asks for: `all`, or layouts with `;` between them.

    `all` are LAYOUTS, some of them with the other kind of head, and the configuration's own.
    Raises ConfigError for what cannot be.
    """
    cases: list[Case] = []
    for part in (piece.strip() for piece in text.split(";")):
        if part == "all":
            cases += _all_cases(config)
        elif part:
            cases.append(_parse(part))
    if not cases:
        raise ConfigError(
            f"--layouts {text!r} names none: write 'all', or layouts like 'data=2;tensor=2,zero=1'"
        )
    return list(dict.fromkeys(cases))


def _all_cases(config: Config) -> Iterable[Case]:
    other = not config.model.tied_head
    yield from (_parse(text) for text in LAYOUTS)
    yield from (replace(_parse(text), tied_head=other) for text in WITH_OTHER_HEAD)
    own = own_case(config)
    if own is not None:
        yield own


def _parse(text: str) -> Case:
    """The case that `data=2,zero=3,activation_checkpoint=full` describes."""
    written: dict[str, str] = {}
    layout: list[str] = []
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if name in SETTINGS:
            written[name] = value
        else:
            layout.append(part)
    parsed = parse_layout(",".join(layout), also=tuple(SETTINGS)) if layout else Layout()
    settings = {name: _setting(text, name, written[name]) for name in SETTINGS if name in written}
    case = Case(parsed, **settings)
    if case.layout.world_size > MOST_PROCESSES_ASKED:
        raise ConfigError(
            f"layout {text!r} needs {case.layout.world_size} processes, which would all run on "
            f"this machine; at most {MOST_PROCESSES_ASKED} are possible, and degrees of 2 prove "
            "as much"
        )
    return case


def _setting(text: str, name: str, value: str) -> Any:
    """The value of one of SETTINGS as `Case` has it. Raises ConfigError."""
    match name:
        case "micro_batches" if value.isdecimal() and 1 <= int(value) <= 64:
            return int(value)
        case "activation_checkpoint" if value in get_args(Recompute):
            return value
        case "tied_head" if value.lower() in ("0", "1", "true", "false"):
            return value.lower() in ("1", "true")
    raise ConfigError(f"layout {text!r}: {name}={value!r} must be {SETTINGS[name]}")


def own_case(config: Config) -> Case | None:
    """The layout of the configuration itself, at degrees of at most 2 where it has more processes
    than MOST_PROCESSES; None where it is one process.

    Where `data` is left to the number of processes it is 2, or 1 where that would be too many.
    Raises ConfigError where the configuration's model cannot be cut so.
    """
    asked = config.parallel
    if asked == ParallelConfig():
        return None
    if asked.data is None:
        n_shared = asked.tensor * asked.pipeline
        least = 2 * asked.replicate if asked.zero or 2 * n_shared <= MOST_PROCESSES else 1
        asked = asked.model_copy(update={"data": least})
    layout = make_layout(asked)
    check_layout(layout, config.model)
    if layout.world_size > MOST_PROCESSES:
        replicated = min(layout.replicate, 2)
        layout = replace(
            layout,
            data=replicated * min(layout.data // layout.replicate, 2),
            replicate=replicated,
            tensor=min(layout.tensor, 2),
            pipeline=min(layout.pipeline, 2),
            virtual_stages=min(layout.virtual_stages, 2),
        )
    if layout == Layout() and config.train.activation_checkpoint is None:
        return None
    return Case(layout, activation_checkpoint=config.train.activation_checkpoint)
