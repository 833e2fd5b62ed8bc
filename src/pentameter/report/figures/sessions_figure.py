"""The figure of a run's sessions: nodes and layout over time, pauses, and steps made again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from pentameter.formatting import duration
from pentameter.record.reading import RecordedRun
from pentameter.record.sessions import MOST_SESSIONS, Session, pauses
from pentameter.report.figures.plots import LIGHT, Palette, plain_axes

STRIP_INCHES = {"wide": (8.4, 2.2), "narrow": (4.0, 2.6)}
"""Sizes of the figure of sessions, for wide and narrow windows."""
LONGEST_PAUSE = 0.15
"""Longest pause between two sessions that is drawn to scale, as a fraction of all sessions."""


def sessions_figure(
    record: RecordedRun, size_inches: tuple[float, float], palette: Palette = LIGHT
) -> Figure | None:
    """Plot how many nodes trained over time, in a colour for each layout; ranks instead, if there
    was never more than one node. Steps that were made again are hatched; each pause is labelled
    with its seconds and these steps. Only the last MOST_SESSIONS are shown.

    Return None if there is nothing to show: the run was never resumed, except to be extended on the
    same ranks, or its events have no times.
    """
    sessions = record.sessions[-MOST_SESSIONS:]
    is_whole = all(each.extends for each in sessions[1:])
    if is_whole and len({(each.n_nodes, each.n_ranks, each.layout) for each in sessions}) < 2:
        return None
    if all(each.end == each.begin for each in sessions):
        return None
    figure, axes = plain_axes(size_inches, palette)
    unit = "nodes" if any(each.n_nodes > 1 for each in sessions) else "ranks"
    layouts = dict.fromkeys(each.layout for each in sessions)
    colours = (palette.train, palette.validation, palette.floor)
    colour_of = dict(zip(layouts, colours, strict=False))  # further layouts share a grey
    starts, is_shortened = _places(sessions)
    width = starts[-1] + sessions[-1].end - sessions[-1].begin
    for start, each in zip(starts, sessions, strict=True):
        height = each.n_nodes if unit == "nodes" else each.n_ranks
        parts = ((each.begin, each.kept_until, ""), (each.kept_until, each.end, "/////"))
        for begin, end, hatch in parts:
            if end > begin:
                axes.bar(
                    start + begin - each.begin, height, end - begin, align="edge", lw=0,
                    hatch=hatch, color=colour_of.get(each.layout, palette.muted),
                    edgecolor=palette.surface,
                )  # fmt: skip
    handles = [Patch(color=colour, label=layout) for layout, colour in colour_of.items()]
    if len(layouts) > len(colours):
        handles.append(Patch(color=palette.muted, label="other layouts"))
    if any(each.lost_steps for each in sessions):
        grey, white = palette.muted, palette.surface
        handles.append(
            Patch(facecolor=grey, edgecolor=white, lw=0, hatch="/////", label="steps made again")
        )
    legend = figure.legend(
        handles=handles, loc="outside lower left", ncols=int(size_inches[0] / 1.9), frameon=False,
        fontsize=9, labelcolor=palette.ink, handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)  # a layout is no formula
    _label_pauses(axes, sessions, starts, width / size_inches[0], palette)
    axes.set_xlabel(f"time{', long pauses shortened' if is_shortened else ''}")
    axes.set_ylabel(unit, color=palette.muted, fontsize=9)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_ylim(0, 1.4 * axes.dataLim.y1)
    axes.set_xlim(0, width)
    return figure


def _places(sessions: Sequence[Session]) -> tuple[list[float], bool]:
    """Return (where each session begins on the time axis, True if a pause was drawn shorter than it
    was). Pauses longer than the fraction LONGEST_PAUSE of the time of all sessions are shortened to
    that."""
    longest = LONGEST_PAUSE * sum(each.end - each.begin for each in sessions)
    starts, found = [0.0], pauses(sessions)
    for each, pause in zip(sessions, found, strict=False):
        shown = longest if math.isnan(pause) else min(pause, longest)
        starts.append(starts[-1] + each.end - each.begin + shown)
    return starts, not all(pause <= longest for pause in found)


def _label_pauses(
    axes: Axes,
    sessions: Sequence[Session],
    starts: Sequence[float],
    per_inch: float,
    palette: Palette,
) -> None:
    """Label each pause where there is room: above it, how long it took and how many steps were made
    again, below it, when the next session began. starts: the sessions' starts on the axis;
    per_inch: axis units in an inch."""
    top = axes.dataLim.y1
    ticks, labels = [0.0], ["0"]
    changes = zip(sessions, sessions[1:], starts, starts[1:], pauses(sessions), strict=False)
    for before, after, start, following, pause in changes:
        if following < ticks[-1] + 0.9 * per_inch:
            continue
        ticks.append(following)
        labels.append(duration(after.begin))
        stopped = start + before.end - before.begin
        again = f"\n{before.lost_steps:,} steps again" if before.lost_steps else ""
        what = "extended" if after.extends else f"{duration(pause)} pause"
        axes.annotate(
            f"{what}{again}", ((stopped + following) / 2, 1.38 * top),
            ha="center", va="top", color=palette.ink, fontsize=8,
        )  # fmt: skip
    axes.set_xticks(ticks, labels)
