"""The cases that `pentameter verify` compares with one process: layouts, and settings that change
how a step is computed but must not change its result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

from pentameter.config.schema import Config, ParallelConfig
from pentameter.config.tables import packaged_table
from pentameter.data.sizes import DataSizes
from pentameter.errors import ConfigError
from pentameter.estimating.search.search import search
from pentameter.estimating.seconds.cluster import parse_cluster
from pentameter.planning.layouts.layout import Layout, make_layout, parse_layout
from pentameter.planning.layouts.layout_checks import (
    adapters_obstacle,
    check_layout,
    model_obstacle,
)
from pentameter.planning.layouts.sharding import sharding_of

MOST_PROCESSES = 8
"""Most ranks in a case made from the configuration's own layout: a larger layout is verified at
lower degrees of parallelism."""

MOST_PROCESSES_ASKED = 64
"""Most ranks in a layout that a user names; they all run on this machine."""

SWITCH = "true or false"
SETTINGS = {
    "micro_batches": "in 1 … 64",
    "activation_checkpoint": "full or selective",
    "compile": SWITCH,
    "tied_head": SWITCH,
    "attention_dropout": SWITCH,
    "idle_experts": SWITCH,
    "kv_heads": "in 1 … 64",
}
"""Name of a setting that a case's text may have besides its layout → its valid values, in words for
an error message."""

Recompute = Literal["full", "selective"]


@dataclass(frozen=True)
class Case:
    """One comparison of `verify`: a layout, and perhaps further settings, whose steps are computed
    and compared with one process's. Neither may change the result. A setting that is None keeps its
    default."""

    layout: Layout
    micro_batches: int | None = None
    """Micro-batches per data-parallel rank; None for 2 · `layout.pipeline` in a pipeline, 2 in any
    other layout, 1 in one process."""
    activation_checkpoint: Recompute | None = None
    compile: bool | None = None
    """Whether steps are captured by `torch.compile`. PyTorch's own kernels compute what was
    captured: capture and recomputation are compared, not the compiler's kernels."""
    tied_head: bool | None = None
    """Whether the head's weight is the embedding's; None keeps the configuration's setting. It also
    applies to the one process that the case is compared with."""
    attention_dropout: bool | None = None
    """False to drop no attention weights: other operations attend then. Else some are dropped,
    whatever the configuration says. It also applies to the one process."""
    idle_experts: bool | None = None
    """True to leave some experts without tokens from the second step on: each token chooses one
    expert, among those that had the fewest tokens in the step before. None keeps the
    configuration's routing. It also applies to the one process."""
    kv_heads: int | None = None
    """Number of KV heads; None for as many as can be sharded. It also applies to the one
    process."""

    @property
    def changes_model(self) -> bool:
        """True if the case's settings change the built-in model; the one process that it is
        compared with then computes the changed model, too."""
        own = (self.tied_head, self.attention_dropout, self.idle_experts, self.kv_heads)
        return any(setting is not None for setting in own)

    @property
    def alone(self) -> Case:
        """The case of one process with which this case is compared, with the same model."""
        return replace(
            self, layout=Layout(), micro_batches=None, activation_checkpoint=None, compile=None
        )

    @property
    def n_micro_batches(self) -> int:
        """Number of micro-batches in a step, per data-parallel rank: `micro_batches` if it is set;
        else 2 · `layout.pipeline` in a pipeline, 2 in any other layout, 1 in one process."""
        if self.micro_batches is not None:
            return self.micro_batches
        if self.layout.pipeline > 1:
            return 2 * self.layout.pipeline
        return 2 if self.layout.world_size > 1 else 1

    def __str__(self) -> str:
        """Return the case as `--layouts` takes it: `data=2,zero=1,micro_batches=4`."""
        own = {name: getattr(self, name) for name in SETTINGS}
        written = [f"{name}={str(own[name]).lower()}" for name in own if own[name] is not None]
        return ",".join([str(self.layout), *written])

    @property
    def name(self) -> str:
        """Description for people, as in verify's table: `data 2 (ZeRO 1), 4 micro-batches`."""
        layout = self.layout
        parts = []
        if layout.data > 1 or layout.zero:
            copies = f", {layout.replicate} copies" if layout.replicate > 1 else ""
            zero = f" (ZeRO {layout.zero}{copies})" if layout.zero else ""
            parts.append(f"data {layout.data}{zero}")
        if layout.tensor > 1:
            how = "sequence" if layout.sequence else layout.tensor_mode
            parts.append(f"tensor {layout.tensor}{'' if how == '1d' else f' ({how})'}")
        if layout.context > 1:
            parts.append(f"context {layout.context} ({layout.context_mode})")
        degrees = {"expert": layout.expert, "expert_tensor": layout.expert_tensor}
        parts += [f"{dimension} {n}" for dimension, n in degrees.items() if n > 1]
        if layout.pipeline > 1:
            virtual = f" × {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
            parts.append(f"pipeline {layout.pipeline}{virtual} ({layout.schedule})")
        settings = {
            f"{self.micro_batches} micro-batches": self.micro_batches,
            f"checkpointing {self.activation_checkpoint}": self.activation_checkpoint,
            "compiled": self.compile,
            "tied head": self.tied_head,
            "untied head": self.tied_head is False,
            "no attention dropout": self.attention_dropout is False,
            "idle experts": self.idle_experts,
            f"{self.kv_heads} key heads": self.kv_heads,
        }
        told = [words for words, is_set in settings.items() if is_set]
        return ", ".join([" × ".join(parts) or "one process", *told])


def _with_experts_of_two(layout: Layout, asked: ParallelConfig) -> Layout:
    """Return the layout with `asked`'s degrees of expert and expert-tensor parallelism, each at
    most 2, and 1 if its ranks do not suffice."""
    for name in ("expert", "expert_tensor"):
        left = layout.expert_sizes["expert_data"] * layout.expert_sizes["expert_shard"]
        if left % 2 == 0:
            layout = replace(layout, **{name: min(getattr(asked, name), 2)})
    return layout


def chosen_cases(config: Config, text: str) -> list[Case]:
    """Return the cases that the text for `--layouts` names, without duplicates: `all`, or layouts
    with `;` between them, such as `data=2;tensor=2,zero=1`.

    `all` stands for the configuration's own layout and those in layouts.toml that are meant for
    such a model. Layouts that could not train its experts or adapters are left out. Raises
    ConfigError for an invalid layout, or if none is named.
    """
    cases: list[Case] = []
    for part in (piece.strip() for piece in text.split(";")):
        if part == "all":
            other, every = not config.model.tied_head, all_cases()
            possible = [*every["plain"], *every["experts"]]
            possible += (replace(case, tied_head=other) for case in every["other_head"])
            if config.model.attention.dropout == 0:
                possible += every["undropped_attention"]
            if config.model.attention.shares_kv_heads and config.model.attention.qk_norm != "width":
                possible += every["copied_heads"]
            for case in possible:
                n_kv = case.kv_heads or config.model.attention.n_kv_heads
                model = config.model.updated({"attention.n_kv_heads": n_kv})
                kv_replicas = sharding_of(case.layout, model).kv_replicas
                if not (
                    (case.compile and config.model.experts.count is None)
                    or adapters_obstacle(config.lora, case.layout, kv_replicas)
                    or model_obstacle(config.model, case.layout)
                ):
                    cases.append(case)
            if (own := own_case(config)) is not None:
                cases.append(own)
        elif part:
            cases.append(_parse(part))
    if not cases:
        raise ConfigError(
            f"--layouts {text!r} names none: write 'all', or layouts like 'data=2;tensor=2,zero=1'"
        )
    return list(dict.fromkeys(cases))


@cache
def all_cases() -> Mapping[str, list[Case]]:
    """Return all cases in layouts.toml: kind of model → the cases meant for it."""
    table = packaged_table("verify/layouts.toml")
    return {kind: list(map(_parse, layouts)) for kind, layouts in table.items()}


def fastest_cases(config: Config, cluster: str, sizes: DataSizes) -> list[Case]:
    """Search for the layouts on which `config` is estimated to train fastest on `cluster` (text
    such as `h100-80gb:8x2`), and return them as cases, best first. sizes: the data's vocabulary and
    rows per epoch. Raises ConfigError if none fits."""
    found = search(config, parse_cluster(cluster), sizes.vocab_size, sizes.rows_per_epoch)
    if not found.estimates:
        raise ConfigError(
            f"--layouts best:{cluster}: no layout of {config.name} fits there; name a larger "
            "cluster, see pentameter plan"
        )
    plans = [estimate.plan for estimate in found.estimates]
    return [
        Case(plan.layout, activation_checkpoint=plan.config.train.activation_checkpoint)
        for plan in plans
    ]


def _parse(text: str) -> Case:
    """Return the case that a text like `data=2,zero=3,activation_checkpoint=full` describes. Raises
    ConfigError for an unknown name or value, and above MOST_PROCESSES_ASKED ranks."""
    settings: dict[str, Any] = {}
    layout: list[str] = []
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if name in SETTINGS:
            settings[name] = _setting(text, name, value)
        else:
            layout.append(part)
    parsed = parse_layout(",".join(layout), also=tuple(SETTINGS)) if layout else Layout()
    case = Case(parsed, **settings)
    if case.layout.world_size > MOST_PROCESSES_ASKED:
        raise ConfigError(
            f"layout {text!r} needs {case.layout.world_size} processes, which would all run on "
            f"this machine; at most {MOST_PROCESSES_ASKED} are possible, and degrees of 2 prove "
            "as much"
        )
    return case


def _setting(text: str, name: str, value: str) -> Any:
    """Return the value of setting `name` in SETTINGS, as `Case` stores it: an int, str or bool.
    Raises ConfigError, quoting the whole case `text`, if it is invalid."""
    match name:
        case "micro_batches" | "kv_heads" if value.isdecimal() and 1 <= int(value) <= 64:
            return int(value)
        case "activation_checkpoint" if value in get_args(Recompute):
            return value
        case _ if SETTINGS[name] == SWITCH and value.lower() in ("0", "1", "true", "false"):
            return value.lower() in ("1", "true")
    raise ConfigError(f"layout {text!r}: {name}={value!r} must be {SETTINGS[name]}")


def own_case(config: Config) -> Case | None:
    """Return the case with the configuration's own layout; None if that is one process. If it has
    more ranks than MOST_PROCESSES, its degrees are reduced to at most 2.

    An unset `parallel.data` depends on the number of processes. It is taken as 2 ·
    `parallel.replicate` with ZeRO, or if 2 · tensor · pipeline · context ranks are at most
    MOST_PROCESSES; else as 1. Raises ConfigError if the configuration's model cannot be sharded
    like this.
    """
    asked = config.parallel
    if asked == ParallelConfig():
        return None
    if asked.data is None:
        n_shared = asked.tensor * asked.pipeline * asked.context
        least = 2 * asked.replicate if asked.zero or 2 * n_shared <= MOST_PROCESSES else 1
        n_expert_ranks = asked.expert * asked.expert_tensor
        least = math.lcm(least, n_expert_ranks // math.gcd(n_expert_ranks, n_shared))
        asked = asked.model_copy(update={"data": least})
    layout = make_layout(asked)
    check_layout(layout, config)
    if layout.world_size > MOST_PROCESSES:
        replicated = min(layout.replicate, 2)
        layout = replace(
            layout,
            data=replicated * min(layout.data // layout.replicate, 2),
            replicate=replicated,
            # Two ranks along each dimension of the tensor grid: 2 in 1-D, 4 in 2-D, 8 in 3-D.
            tensor=math.prod(min(2, layout.sizes[name]) for name in ("depth", "row", "tensor")),
            tensor_depth=min(layout.tensor_depth, 2),
            context=min(layout.context, 2),
            pipeline=min(layout.pipeline, 2),
            virtual_stages=min(layout.virtual_stages, 2),
            expert=1,
            expert_tensor=1,
        )
        layout = _with_experts_of_two(layout, asked)
    if layout == Layout() and config.train.activation_checkpoint is None:
        return None
    return Case(layout, activation_checkpoint=config.train.activation_checkpoint)
