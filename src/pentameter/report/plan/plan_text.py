"""A planned run as text for a terminal: verdict, memory, time, and a search's best layouts."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pentameter.estimating.bytes.fit import Verdict
from pentameter.estimating.search.scaling import ScalePoint
from pentameter.estimating.search.search import Found, reasons
from pentameter.estimating.seconds.estimate import Estimate
from pentameter.formatting import count, size
from pentameter.report.plan.plan_page import (
    first_advice,
    imbalance_assumed,
    layout_rows,
    memory_components,
    recomputed,
    time_assumed,
    time_components,
    verdict,
)

BAR = 28
"""Width of a bar, in characters."""
LAYOUT_WIDTH = 50
"""Characters per line of a layout's name in a table."""
EQUALLY_FAST = 0.0005
"""Two layouts count as equally fast if their times differ by less than this fraction."""
MARKS: dict[Verdict, tuple[str, str]] = {
    "fits": ("✓", "green"),
    "tight": ("~", "yellow"),
    "does not fit": ("✗", "red"),
}
"""Maps a verdict on memory to its sign and colour."""
PLAIN: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0), "header_style": "bold"}
"""Arguments for rich's Table that draw no lines between columns."""


def plan_text(estimate: Estimate, found: Found | None, price: float | None) -> list[RenderableType]:
    """Return rich renderables about a planned run: verdict, memory, time, and then the layouts that
    a search found, or a line with advice.

    found: the search's result; None for advice.
    price: money per device-hour; None to leave the cost out.
    """
    plan, cluster = estimate.plan, estimate.cluster
    header = Text()
    header.append(plan.config.name, style="bold")
    header.append(
        f" · {plan.n_parameters:,} parameters on {cluster.n_devices:,} × "
        f"{cluster.device.name or cluster.device_key} in nodes of {cluster.node_size}\n"
        f"layout {plan.layout} · micro-batch {plan.micro_batch_size} × {plan.n_micro_batches} · "
        f"{plan.tokens_per_step:,} tokens a step · {estimate.precision}{recomputed(estimate)}"
        f"{imbalance_assumed(estimate)}"
    )
    mark, colour = MARKS[estimate.verdict]
    said = Text(f"\n{mark} {verdict(estimate, price)}\n", style=f"bold {colour}")
    usable = cluster.usable_bytes
    memory = [(*part, "") for part in memory_components(estimate)]
    of = f"peak, of {size(usable)} usable: parts do not all peak at once"
    memory.append(("in all", estimate.device_bytes, of, colour))
    rows = [(name, size(n), n / usable, remark, style) for name, n, remark, style in memory]
    parts: list[RenderableType] = [header, said, _bar_table("memory", rows), Text("")]
    seconds = [
        (name, f"{value:.3g} s", share, f"{share:.1%}  {remark}", "")
        for name, value, share, remark in time_components(estimate)
    ]
    parts += [_bar_table("time of a step", seconds), Text("")]
    if found is not None:
        parts += [_found_table(found), Text(_search_summary(found)), Text("")]
    else:
        advice = first_advice(estimate)
        if advice is not None:
            parts.append(Text(f"first  {advice}"))
    parts.append(Text(time_assumed(estimate), style="dim"))
    parts += [Text(f"!  {line}", style="yellow") for line in estimate.warnings()]
    return parts


def _bar_table(title: str, rows: Iterable[tuple[str, str, float, str, str]]) -> Table:
    """Return a table with a bar in each row. Rows are (name, value, bar's fraction, remark, bar's
    style)."""
    table = Table(**PLAIN)
    table.add_column(title, no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, value, share, remark, style in rows:
        table.add_row(f"  {name}", value, Text(_bar(share), style), Text(remark, "dim"))
    return table


def _bar(share: float) -> str:
    """Draw a bar in block characters, precise to an eighth, for a fraction from 0 to 1."""
    eighths = max(0, min(BAR * 8, round(share * BAR * 8)))
    whole, part = divmod(eighths, 8)
    return "█" * whole + ("", *"▏▎▍▌▋▊▉")[part]


def _found_table(found: Found) -> Table:
    table = Table(**PLAIN)
    table.add_column("best layouts", overflow="fold")
    for title in ("micro-batch", "recomputes", "s a step", "MFU", "to spare"):
        table.add_column(title, justify="right", no_wrap=True)
    for layout, *row in layout_rows(found):
        table.add_row(_wrap_layout(layout), *row)
    return table


def _wrap_layout(layout: str) -> str:
    """Break a layout's name into lines that end with a comma, so that it can be copied."""
    return textwrap.fill(layout.replace(",", ", "), LAYOUT_WIDTH).replace(", ", ",")


def _search_summary(found: Found) -> str:
    """Return lines about a search: why the best layout is faster than the next, or why it is ranked
    above a faster one, and the number of candidates."""
    best, *others = found.estimates
    lines = []
    if others:
        slower = others[0].time.seconds / best.time.seconds - 1
        why = ", ".join(reasons(best, others[0])) or "a little of everything"
        if abs(slower) < EQUALLY_FAST:
            lines.append("The first and the second take the same time.")
        elif slower < 0:
            lines.append(f"The second is {-slower:.1%} faster, but tight.")
        else:
            lines.append(f"The first beats the second by {slower:.1%}: {why}.")
    went = "all others are slower" if found.is_complete else "others were not timed"
    lines.append(
        f"{found.n_candidates:,} candidates: {found.n_too_large:,} do not fit, {found.n_tight:,} "
        f"are tight, {found.n_timed:,} timed in full; {went} ({found.seconds:.1f} s)."
    )
    return "\n".join(lines)


def scale_table(points: list[ScalePoint]) -> Table:
    """Return a table with a row per cluster size: the best layout with its predicted tokens per
    second, efficiency and MFU, and the speeds without pipeline and with data parallelism alone,
    relative to the best."""
    table = Table(**PLAIN)
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
            _wrap_layout(str(best.plan.layout))
            + f" ·\N{NO-BREAK SPACE}{best.plan.micro_batch_size}\N{NO-BREAK SPACE}×"
            + f"\N{NO-BREAK SPACE}{best.plan.n_micro_batches}"
            + (", tight" if best.verdict == "tight" else ""),
            *(
                "–" if each is None else f"{each.tokens_per_second / best.tokens_per_second:.0%}"
                for each in (point.without_pipeline, point.data_alone)
            ),
        )
    return table
