"""The loss curves of several runs in one figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure

from pentameter.report.curves import limits, settled_limits, smoothed, thinned
from pentameter.report.plots import PAGE, RUN_COLOURS, limit_axes, plain_axes, say_cut
from pentameter.report.reading import RunRecord, Series

SIZE_INCHES = (5.2, 3.4)
AXES = {"step": "step", "tokens": "tokens", "elapsed_seconds": "seconds of training"}
"""Horizontal axes that a loss can be drawn over, with their labels."""
LOSSES: dict[str, Callable[[RunRecord], Series]] = {
    "Validation loss": lambda record: record.split_losses("val"),
    "Training loss, smoothed": lambda record: record.train.get("loss", Series()),
}
DASHES = ((0, ()), (0, (4, 1.5)), (0, (1, 1)))


def overlay_figure(
    loss: str,
    runs: Sequence[tuple[str, RunRecord]],
    *,
    axis: str = "step",
    settled: bool = True,
) -> Figure | None:
    """A loss of all runs, each in its colour; None where no run has values.

    Args:
        loss: a key of LOSSES.
        runs: label and record of each, in the order that gives them their colours.
        axis: a key of AXES.
        settled: leave the fall at the start above the axis where there is one, and say so.
    """
    curves = [LOSSES[loss](record) for _, record in runs]
    whole = limits(tuple(curves))
    if whole is None:
        return None
    figure, axes = plain_axes(SIZE_INCHES, PAGE)
    for index, ((label, record), series) in enumerate(zip(runs, curves, strict=True)):
        if not len(series):
            continue
        few = len(series) <= 40
        steps, values = thinned(series) if loss == "Validation loss" or few else smoothed(series)
        axes.plot(
            _along(record, axis, steps), values, color=RUN_COLOURS[index % len(RUN_COLOURS)],
            ls=DASHES[index // len(RUN_COLOURS) % len(DASHES)], lw=1.7, label=label,
            marker="o" if few else "", ms=2.6,
        )  # fmt: skip
    cut = settled_limits(tuple(curves)) if settled else None
    limit_axes(axes, cut or whole)
    if cut is not None:
        say_cut(axes, whole[1], PAGE)
    axes.set_xlabel(AXES[axis], color=PAGE.muted, fontsize=9)
    axes.legend(loc="upper right", frameon=False, fontsize=8.5, labelcolor=PAGE.ink)
    return figure


def is_cut(runs: Sequence[tuple[str, RunRecord]]) -> bool:
    """Whether a figure leaves the fall at the start above its axis."""
    return any(
        settled_limits(tuple(curve(record) for _, record in runs)) for curve in LOSSES.values()
    )


def useful_axes(runs: Sequence[tuple[str, RunRecord]]) -> list[str]:
    """The axes that show the runs differently: tokens where steps are of different length, time
    where it is known."""
    found = ["step"]
    if len({record.start.get("tokens_per_step") for _, record in runs}) > 1:
        found.append("tokens")
    found.append("elapsed_seconds")
    return [
        axis for axis in found
        if axis == "step" or all(len(record.train.get(axis, Series())) for _, record in runs)
    ]  # fmt: skip


def _along(record: RunRecord, axis: str, steps: np.ndarray) -> np.ndarray:
    """The place of each step on an axis, from the lines of metrics.jsonl around it."""
    if axis == "step":
        return steps
    series = record.train[axis]
    return np.interp(steps, (0, *series.steps), (0.0, *series.values))
