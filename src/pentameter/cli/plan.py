"""`pentameter plan`: a configuration's memory, time and best layouts on a cluster."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pentameter.cli.options.arguments import parse_arguments, print_tables, sizes_of_data
from pentameter.errors import ConfigError

if TYPE_CHECKING:
    from pentameter.config.schema import Config
    from pentameter.data.sizes import DataSizes
    from pentameter.estimating.search.search import Found
    from pentameter.estimating.seconds.cluster import Cluster
    from pentameter.estimating.seconds.estimate import Estimate

WIDTH = 110
"""Line width without a terminal, in characters."""


@dataclass(frozen=True)
class PlanArguments:
    """Estimate a configuration's memory, time and fit, and find the best layout.

    Needs no GPU and starts nothing. Every key of the configuration can be overridden:
    --train.micro-batch-size 2.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET-or-FILE")]
    """A preset (gpt2-124m, gpt3-175b, …) or a TOML file."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="DEVICE:GPUSxNODES")] = None
    """Devices in nodes, as h100-80gb:8x16, or a TOML file of a device in their place. When absent,
    this machine as `doctor --measure` has measured it."""
    layout: Annotated[str | None, tyro.conf.arg(metavar="best|LAYOUT")] = None
    """Instead of [parallel]: data=8,tensor=8,pipeline=16,zero=1; what is left out is 1, and data
    whatever the cluster leaves. `best` is --search."""
    search: tyro.conf.FlagCreatePairsOff[bool] = False
    """Find the fastest layouts that fit, with their micro-batch and activation checkpointing."""
    scale: tyro.conf.FlagCreatePairsOff[bool] = False
    """Tokens per second and efficiency of the best layouts on 1, 2, 4, … 16,384 devices."""
    timeline: Annotated[Path | None, tyro.conf.arg(metavar="FILE.svg")] = None
    """Draw the pipeline's schedule."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the plan as a page to open in a browser."""
    imbalance: Annotated[float, tyro.conf.arg(metavar="RATIO")] = 1.0
    """Assume that, in each layer with experts, one rank's experts get so many times the mean number
    of tokens over ranks, in time and in memory. 1: all get equally many."""
    matmuls: Annotated[str | None, tyro.conf.arg(metavar="fp8")] = None
    """Assume that all linear layers multiply in this number format, also for weights' gradients and
    in experts, as other programs do: fp8. train.matmuls=fp8 plans what pentameter trains."""
    price: Annotated[float | None, tyro.conf.arg(metavar="MONEY")] = None
    """The price of a device for an hour, to say what the run costs."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""


def run(arguments: list[str]) -> int:
    """Print the plan that `arguments` (the command line after the verb) ask for, and return the
    exit code 0, whether it fits or not."""
    parsed, overrides = parse_arguments(PlanArguments, arguments, verb="plan")
    from pentameter.config.files.command_source import configuration_of
    from pentameter.config.files.load import flat_overrides, load_config
    from pentameter.estimating.seconds.cluster import parse_cluster
    from pentameter.machine.this_cluster import measured_cluster
    from pentameter.planning.layouts.layout import BEST, layout_overrides

    if parsed.layout == BEST:
        parsed = replace(parsed, search=True)
    layout = BEST if parsed.search or parsed.scale else parsed.layout
    given = {**flat_overrides(overrides), **layout_overrides(layout)}
    config = load_config(*configuration_of(parsed.source, given))
    _check_imbalance(config, parsed.imbalance)
    if parsed.price is not None and not 0 <= parsed.price < math.inf:
        raise ConfigError(f"--price {parsed.price:g} must be an amount of money, 0 or more")
    sizes = sizes_of_data(config)
    cluster = measured_cluster() if parsed.cluster is None else parse_cluster(parsed.cluster)
    if cluster is None:
        return _without_cluster(config, parsed, sizes)
    known = (sizes.vocab_size, sizes.rows_per_epoch)
    if parsed.scale:
        return _scale(config, cluster, known, parsed)
    found = None
    if parsed.search:
        from pentameter.estimating.search.search import search, why_nothing_fits

        found = search(config, cluster, *known, imbalance=parsed.imbalance, matmuls=parsed.matmuls)
        if not found.estimates:
            raise ConfigError(why_nothing_fits(config, cluster, found))
        estimate = found.estimates[0]
    else:
        from pentameter.estimating.seconds.estimate import make_estimate

        estimate = make_estimate(
            config, cluster, *known, imbalance=parsed.imbalance, matmuls=parsed.matmuls
        )
    _write_pictures(estimate, found, parsed)
    if parsed.json:
        shown = sizes.without_unknown(estimate.to_json())
        if found is not None:
            shown |= {"layouts": [each.to_json() for each in found.estimates]}
        if parsed.price is not None:
            hours = estimate.device_hours
            shown["price"] = None if hours is None else parsed.price * hours
        print(json.dumps(shown))
        return 0
    from pentameter.report.plan.plan_text import plan_text

    print_tables(plan_text(estimate, found, parsed.price), WIDTH)
    return 0


def _check_imbalance(config: Config, imbalance: float) -> None:
    """Raise ConfigError for an imbalance below 1 or not finite, or above 1 for a model without
    experts."""
    if not 1 <= imbalance < math.inf:
        raise ConfigError(
            f"--imbalance {imbalance:g} must be at least 1: the most rows that a rank's experts "
            "get ÷ the mean over ranks"
        )
    if imbalance > 1 and config.model.experts.count is None:
        raise ConfigError(
            f"--imbalance {imbalance:g} is about experts, and {config.name} has none; leave it out"
        )


def _without_cluster(config: Config, parsed: PlanArguments, sizes: DataSizes) -> int:
    """Print the planned run's memory and communication without times, as no device is known; return
    the exit code 0. Raises ConfigError for options that need times."""
    from pentameter.estimating.bytes.plan_estimates import describe_plan, plan_record
    from pentameter.planning.plan import make_plan

    hint = "name a cluster, --cluster a100-80gb:8x1, or measure this machine: doctor --measure"
    asked = [
        f"--{name.replace('_', '-')}"
        for name in ("search", "scale", "timeline", "html", "price", "matmuls")
        if getattr(parsed, name) not in (None, False)
    ]
    if asked:
        raise ConfigError(f"{asked[0]} needs to know the devices: {hint}")
    plan = make_plan(config, sizes.vocab_size, sizes.rows_per_epoch)
    shown = sizes.without_unknown(plan_record(plan))
    shown["time"] |= {"step_seconds": None, "tokens_per_second": None, "mfu": None}
    shown |= {"fits": None, "verdict": None, "warnings": [f"no time and no verdict: {hint}"]}
    if parsed.json:
        print(json.dumps(shown))
        return 0
    print(f"{describe_plan(plan)}\n{hint}")
    return 0


def _scale(
    config: Config, cluster: Cluster, known: tuple[int | None, int | None], parsed: PlanArguments
) -> int:
    from pentameter.estimating.search.scaling import scale

    for option, path in (("--html", parsed.html), ("--timeline", parsed.timeline)):
        if path is not None and path.suffix.lower() not in (".svg", ".png", ".pdf"):
            raise ConfigError(
                f"{option} {path}: of --scale a picture is drawn; name a file that ends in .svg, "
                ".png or .pdf"
            )
    points = []
    scaled = scale(config, cluster, *known, imbalance=parsed.imbalance, matmuls=parsed.matmuls)
    for point in scaled:
        points.append(point)
        if sys.stderr.isatty():
            print(f"\r{point.n_devices:,} devices", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    for path in filter(None, (parsed.html, parsed.timeline)):
        from pentameter.report.plan.plan_page import write_scale_figure

        print(write_scale_figure(path, config.name, points), file=sys.stderr)
    if parsed.json:
        print(json.dumps({"cluster": cluster.device_key, "scale": [p.to_json() for p in points]}))
        return 0
    from pentameter.report.plan.plan_text import scale_table

    print_tables([scale_table(points)], WIDTH)
    return 0


def _write_pictures(estimate: Estimate, found: Found | None, parsed: PlanArguments) -> None:
    if parsed.timeline is not None:
        from pentameter.report.figures.markup import write_page
        from pentameter.report.plan.timeline_svg import timeline_svg

        if estimate.plan.layout.pipeline == 1:
            raise ConfigError(
                f"--timeline {parsed.timeline}: the layout {estimate.plan.layout} has no pipeline"
            )
        print(write_page(parsed.timeline, timeline_svg(estimate)), file=sys.stderr)
    if parsed.html is not None:
        from pentameter.report.plan.plan_page import write_plan_page

        print(write_plan_page(parsed.html, estimate, found, parsed.price), file=sys.stderr)
