"""`pentameter plan`: what a configuration needs and how long it takes on a cluster."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pentameter.cli.arguments import parse_arguments
from pentameter.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pentameter.config.schema import Config
    from pentameter.planning.cluster import Cluster
    from pentameter.planning.estimate import Estimate
    from pentameter.planning.scaling import ScalePoint
    from pentameter.planning.search import Found

BAR = 28
"""Characters of a bar."""
WIDTH = 110
"""Characters of a line where the output is no terminal."""
LAYOUT_WIDTH = 50
"""Characters of a line of a layout in a table."""


@dataclass(frozen=True)
class PlanArguments:
    """Say what a configuration needs: memory, time, whether it fits, and which layout is best.

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
    price: Annotated[float | None, tyro.conf.arg(metavar="MONEY")] = None
    """The price of a device for an hour, to say what the run costs."""
    dry_run_rank: Annotated[int | None, tyro.conf.arg(metavar="RANK")] = None
    """Build this rank's part of the model on no memory, run a micro-batch through it, and compare
    parameters, gradients and activations with the plan's. This needs torch."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""


def run(arguments: list[str]) -> int:
    """Plan; 0 whether it fits or not."""
    parsed, overrides = parse_arguments(PlanArguments, arguments, verb="plan")
    from pentameter.cli.train import (
        BEST,
        configuration_of,
        layout_overrides,
        vocabulary_and_epoch,
    )
    from pentameter.config.load import load_config

    if parsed.layout == BEST:
        parsed = replace(parsed, search=True)
    layout = BEST if parsed.search or parsed.scale else parsed.layout
    overrides = [*overrides, *layout_overrides(layout)]
    config = load_config(*configuration_of(parsed.source, overrides))
    vocab_size, rows_per_epoch, unknown = vocabulary_and_epoch(config)
    known = (vocab_size, rows_per_epoch)
    cluster = _cluster(parsed.cluster)
    if cluster is None:
        return _without_cluster(config, parsed, known, unknown)
    if parsed.scale:
        return _scale(config, cluster, known, parsed)
    found = None
    if parsed.search:
        from pentameter.planning.search import search, why_nothing_fits

        found = search(config, cluster, *known)
        if not found.estimates:
            raise ConfigError(why_nothing_fits(config, cluster, found))
        estimate = found.estimates[0]
    else:
        from pentameter.planning.estimate import make_estimate

        estimate = make_estimate(config, cluster, *known)
    if parsed.dry_run_rank is not None:
        _compare_rank(estimate, parsed.dry_run_rank)
    _write_pictures(estimate, found, parsed)
    if parsed.json:
        shown = estimate.to_json() | dict.fromkeys(unknown)
        if found is not None:
            shown |= {"layouts": [each.to_json() for each in found.estimates]}
        if parsed.price is not None:
            hours = estimate.device_hours
            shown["price"] = None if hours is None else parsed.price * hours
        print(json.dumps(shown))
        return 0
    _print(_view(estimate, found, parsed.price))
    return 0


def _cluster(text: str | None) -> Cluster | None:
    """The cluster that is named, else this machine where it was measured, else None."""
    from pentameter.disk.cache import cache_folder
    from pentameter.planning.cluster import MEASURED_FILE, parse_cluster

    if text is not None:
        return parse_cluster(text)
    measured = cache_folder() / MEASURED_FILE
    return parse_cluster(f"{measured}:1x1") if measured.is_file() else None


def _without_cluster(
    config: Config,
    parsed: PlanArguments,
    known: tuple[int | None, int | None],
    unknown: list[str],
) -> int:
    """Memory and traffic alone; what asks for time is refused."""
    from pentameter.planning.plan import make_plan

    hint = "name a cluster, --cluster a100-80gb:8x1, or measure this machine: doctor --measure"
    asked = [
        f"--{name.replace('_', '-')}"
        for name in ("search", "scale", "timeline", "html", "price", "dry_run_rank")
        if getattr(parsed, name) not in (None, False)
    ]
    if asked:
        raise ConfigError(f"{asked[0]} needs to know the devices: {hint}")
    plan = make_plan(config, *known)
    shown = plan.to_json() | dict.fromkeys(unknown)
    shown["time"] |= {"step_seconds": None, "tokens_per_second": None, "mfu": None}
    shown |= {"fits": None, "warnings": [f"no time and no verdict: {hint}"]}
    if parsed.json:
        print(json.dumps(shown))
        return 0
    print(f"{plan.in_words()}\n{hint}")
    return 0


def _scale(
    config: Config,
    cluster: Cluster,
    known: tuple[int | None, int | None],
    parsed: PlanArguments,
) -> int:
    from pentameter.planning.scaling import scale

    for option, path in (("--html", parsed.html), ("--timeline", parsed.timeline)):
        if path is not None and path.suffix.lower() not in (".svg", ".png", ".pdf"):
            raise ConfigError(
                f"{option} {path}: of --scale a picture is drawn; name a file that ends in .svg, "
                ".png or .pdf"
            )
    points = []
    for point in scale(config, cluster, *known):
        points.append(point)
        if sys.stderr.isatty():
            print(f"\r{point.n_devices:,} devices", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if parsed.html is not None or parsed.timeline is not None:
        from pentameter.report.plan_page import write_scale_figure

        for path in (parsed.html, parsed.timeline):
            if path is not None:
                print(write_scale_figure(path, config.name, points), file=sys.stderr)
    if parsed.json:
        print(json.dumps({"cluster": cluster.device_key, "scale": [p.to_json() for p in points]}))
        return 0
    _print(_scale_table(points))
    return 0


def _compare_rank(estimate: Estimate, rank: int) -> None:
    """Print the bytes of a rank that was traced on fake tensors, beside the plan's."""
    from pentameter.parallel.dry_run import trace_rank

    print(trace_rank(estimate.plan, rank, estimate.precision), file=sys.stderr)


def _write_pictures(estimate: Estimate, found: Found | None, parsed: PlanArguments) -> None:
    if parsed.timeline is not None:
        from pentameter.report.markup import write_page
        from pentameter.report.timeline_svg import timeline_svg

        if estimate.plan.layout.pipeline == 1:
            raise ConfigError(
                f"--timeline {parsed.timeline}: the layout {estimate.plan.layout} has no pipeline"
            )
        print(write_page(parsed.timeline, timeline_svg(estimate)), file=sys.stderr)
    if parsed.html is not None:
        from pentameter.report.plan_page import write_plan_page

        print(write_plan_page(parsed.html, estimate, found, parsed.price), file=sys.stderr)


# -- what people see ----------------------------------------------------------------------------


def _print(parts: list[RenderableType]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=WIDTH)
    for part in parts:
        console.print(part)


def _view(estimate: Estimate, found: Found | None, price: float | None) -> list[RenderableType]:
    from rich.text import Text

    from pentameter.report.plan_page import first_advice, recomputed, verdict

    plan, cluster = estimate.plan, estimate.cluster
    header = Text()
    header.append(plan.config.name, style="bold")
    header.append(
        f" · {plan.n_parameters:,} parameters on {cluster.n_devices:,} × "
        f"{cluster.device.name or cluster.device_key} in nodes of {cluster.node_size}\n"
        f"layout {plan.layout} · micro-batch {plan.micro_batch_size} × {plan.n_micro_batches} · "
        f"{plan.tokens_per_step:,} tokens a step · {estimate.precision}{recomputed(estimate)}"
    )
    said = Text(
        f"\n{'✓' if estimate.fits else '✗'} {verdict(estimate, price)}\n",
        style="bold green" if estimate.fits else "bold red",
    )
    parts: list[RenderableType] = [header, said, _memory_table(estimate), Text("")]
    parts += [_time_table(estimate), Text("")]
    if found is not None:
        parts += [_found_table(found), Text(_why(found)), Text("")]
    else:
        advice = first_advice(estimate)
        if advice is not None:
            parts.append(Text(f"first  {advice}"))
    parts += [Text(f"!  {line}", style="yellow") for line in estimate.warnings()]
    return parts


def _rows_table(title: str) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", title_justify="left")
    table.add_column(title, no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    return table


def _bar(share: float, width: int = BAR) -> str:
    """A bar of blocks, in eighths."""
    eighths = max(0, min(width * 8, round(share * width * 8)))
    whole, part = divmod(eighths, 8)
    return "█" * whole + ("", *"▏▎▍▌▋▊▉")[part]


def _memory_table(estimate: Estimate) -> Any:
    from rich.text import Text

    from pentameter.report.plan_page import memory_parts
    from pentameter.wording import size

    usable = estimate.cluster.usable_bytes
    table = _rows_table("memory")
    for name, n_bytes, remark in memory_parts(estimate):
        table.add_row(f"  {name}", size(n_bytes), _bar(n_bytes / usable), Text(remark, style="dim"))
    of = f"peak, of {size(usable)} usable: parts do not all peak at once"
    style = "green" if estimate.fits else "red"
    table.add_row(
        "  in all",
        size(estimate.device_bytes),
        Text(_bar(estimate.device_bytes / usable), style=style),
        Text(of, style="dim"),
    )
    return table


def _time_table(estimate: Estimate) -> Any:
    from rich.text import Text

    from pentameter.report.plan_page import time_parts

    table = _rows_table("time of a step")
    whole = estimate.time.seconds
    for name, seconds, remark in time_parts(estimate):
        if seconds > 1e-4 * whole:
            share = seconds / whole
            table.add_row(
                f"  {name}", f"{seconds:.3g} s", _bar(share), Text(f"{share:.1%}  {remark}", "dim")
            )
    return table


def _found_table(found: Found) -> Any:
    from rich.table import Table

    from pentameter.report.plan_page import found_rows

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("best layouts", overflow="fold")
    for title in ("micro-batch", "recomputes", "s a step", "MFU", "to spare"):
        table.add_column(title, justify="right", no_wrap=True)
    for layout, *row in found_rows(found):
        table.add_row(_folded(layout), *row)
    return table


def _folded(layout: str) -> str:
    """A layout in lines that end with a comma, so that each can be copied."""
    return textwrap.fill(layout.replace(",", ", "), LAYOUT_WIDTH).replace(", ", ",")


def _why(found: Found) -> str:
    """Why the best is the best, against the next, and how far the search went."""
    from pentameter.planning.search import reasons

    best, *others = found.estimates
    lines = []
    if others:
        slower = others[0].time.seconds / best.time.seconds - 1
        why = ", ".join(reasons(best, others[0])) or "a little of everything"
        lines.append(f"The first beats the second by {slower:.1%}: {why}.")
    went = "all others are slower" if found.is_complete else "others were not timed"
    lines.append(
        f"{found.n_candidates:,} candidates: {found.n_too_large:,} do not fit, {found.n_timed:,} "
        f"timed in full; {went} ({found.seconds:.1f} s)."
    )
    return "\n".join(lines)


def _scale_table(points: list[ScalePoint]) -> list[RenderableType]:
    from rich.table import Table

    from pentameter.wording import count

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("devices", "tokens/s", "efficiency", "MFU"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("best layout", overflow="fold")
    table.add_column("without pipeline", justify="right", no_wrap=True)
    table.add_column("data alone", justify="right", no_wrap=True)
    for point in points:
        best = point.best
        if best is None:
            table.add_row(f"{point.n_devices:,}", "–", "–", "–", point.why or "nothing fits")
            continue
        table.add_row(
            f"{point.n_devices:,}",
            count(best.tokens_per_second),
            f"{point.efficiency:.0%}",
            f"{best.mfu:.1%}",
            _folded(str(best.plan.layout))
            + f" ·\N{NO-BREAK SPACE}{best.plan.micro_batch_size}\N{NO-BREAK SPACE}×"
            + f"\N{NO-BREAK SPACE}{best.plan.n_micro_batches}",
            *(
                "–" if each is None else f"{each.tokens_per_second / best.tokens_per_second:.0%}"
                for each in (point.without_pipeline, point.data_alone)
            ),
        )
    return [table]
