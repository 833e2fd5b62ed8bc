"""Report figures, drawn through matplotlib's object interface, without global state."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, PercentFormatter

from pentameter.disk.atomic import storage_errors
from pentameter.errors import ConfigError
from pentameter.record.curves import Series, envelope, limits, settled_limits, smoothed, thinned
from pentameter.record.reading import LARGEST_DRAWN, RecordedRun, as_table
from pentameter.report.figures.markup import visible

WIDE_INCHES = (8.4, 3.5)
NARROW_INCHES = (4.0, 3.2)
SMALL_INCHES = (4.2, 2.1)
OVERLAY_INCHES = (5.2, 3.4)
AXES = {"step": "step", "tokens": "tokens seen", "elapsed_seconds": "seconds of training"}
"""Quantities that several runs' losses are plotted over, with their axis labels."""
LOSSES: dict[str, Callable[[RecordedRun], Series]] = {
    "Validation loss": lambda record: record.validation_losses(),
    "Training loss, smoothed": lambda record: record.train["loss"],
}
"""Losses for figures with several runs: title → function that returns a run's curve."""
NATS, BITS = "nats per token", "bits per byte"
"""Units of a loss. Only bits per byte compare runs whose tokens or texts differ."""
_UNNAMED = re.compile(r"_child\d+")
"""Pattern of the labels that matplotlib gives to lines without one."""
THINNEST_POINTS = 1.5
"""Lines of at least this width, in points, are curves that show values on hover; thinner ones are
noise, grid or marks."""
DASHES = ((), (5, 2), (1.5, 1.5), (7, 1.5, 1.5, 1.5))
"""Line styles in matplotlib's form: lengths drawn and left out, in multiples of the line width."""


@dataclass(frozen=True)
class Palette:
    """Colours by role. Blue and orange can be told apart with any colour vision."""

    ink: str = "#1c2430"
    muted: str = "#66707f"
    grid: str = "#e3e7ee"
    surface: str = "#ffffff"
    train: str = "#2f6bdb"
    validation: str = "#dd6b10"
    floor: str = "#138a5e"


LIGHT = Palette()
# For the page: colours that stand for a CSS variable each, so that one drawing serves light and
# dark. `page_svg` replaces them; no other colour may be used in a figure.
PAGE = Palette(*(f"#ab00{index:02x}" for index in range(1, 8)))
RUN_COLOURS = tuple(f"#ab01{index:02x}" for index in range(1, 6))
"""Placeholder colours for runs on a comparison page; `page_svg` replaces them by the CSS variables
--run-1 to --run-5, which can be told apart with every kind of colour vision."""
RUN_STYLES = tuple(
    (colour, dashes) for dashes in DASHES for colour in range(1, len(RUN_COLOURS) + 1)
)
"""(number of the run colour, from 1, dashes) for each run in order; further runs are drawn pale."""
_PAGE_VARIABLES = {colour: f"var(--{role})" for role, colour in vars(PAGE).items()} | {
    colour: f"var(--run-{index})" for index, colour in enumerate(RUN_COLOURS, 1)
}


def loss_figure(
    record: RecordedRun,
    *,
    size_inches: tuple[float, float] = WIDE_INCHES,
    palette: Palette = LIGHT,
    settled: bool = False,
) -> Figure | None:
    """Plot a run's training and validation loss over steps, with the best marked; return None if
    the run has no loss. If the entropy rate is known (grammar corpus), it is drawn as a line.

    settled: True to cut off the steep fall at the start, with a note that says so; None is returned
        if there is no such fall.
    """
    train, validation = record.train["loss"], record.validation_losses()
    floor = entropy_rate(record)
    extra = () if floor is None else (floor,)
    whole = limits((train, validation), extra)
    span = settled_limits((train, validation), extra) if settled else whole
    if whole is None or span is None or not (len(train) or len(validation)):
        return None
    figure, axes = plain_axes(size_inches, palette)
    _draw_noisy(axes, train, palette, label="train")
    if len(validation):
        x, y = thinned(validation)
        marker = "o" if len(x) <= 40 else ""
        label = "validation" if record.sample is None else "validation, a sample"
        axes.plot(x, y, color=palette.validation, lw=1.8, marker=marker, ms=3.2, label=label)
    best = record.best()
    if best is not None:
        axes.plot(
            [best.step], [best.loss], linestyle="none", marker="o", ms=8, zorder=5,
            markerfacecolor=palette.surface, markeredgecolor=palette.validation,
            markeredgewidth=2, label=f"best {best.loss:.4f} at step {best.step:,}",
        )  # fmt: skip
    if floor is not None:
        axes.axhline(
            floor, color=palette.floor, lw=1.4, ls=(0, (5, 3)), label=f"entropy rate {floor:.4f}"
        )
    _draw_marks(axes, record, palette, labelled=True)
    _limit_axes(axes, span)
    if settled:
        _note_hidden_start(axes, whole[1], palette)
    axes.set_ylabel("loss, nats per token", color=palette.muted, fontsize=9)
    axes.legend(
        loc="upper right", frameon=False, fontsize=9, labelcolor=palette.ink, handlelength=1.6
    )
    return figure


def small_figures(record: RecordedRun, palette: Palette) -> list[tuple[str, str, Figure]]:
    """Return (key, title, figure) for each further curve that the run has: learning rate, gradient
    norm, tokens per second, MFU, and the fraction of a step for which ranks wait for the slowest
    one. If MFU is proportional to the speed, it is that figure's right axis instead."""
    percent = PercentFormatter(xmax=1, decimals=None)
    engineering = EngFormatter(sep="")
    scientific = FuncFormatter(lambda value, _: f"{value:g}".replace("e-0", "e-"))
    per_token = _mfu_per_token(record)
    speed = "Tokens per second" + ("" if per_token is None else ", and MFU at the right")
    wanted: tuple[tuple[str, str, Callable[..., Any], bool], ...] = (
        ("learning_rate", "Learning rate", scientific, False),
        ("grad_norm", "Gradient norm before clipping", FuncFormatter(_format_number), True),
        ("tokens_per_second", speed, engineering, True),
        ("mfu", "Model FLOPs utilisation", percent, True),
        ("waited", "Waiting for the slowest rank", percent, True),
    )
    figures = []
    for key, title, formatter, noisy in wanted:
        series = record.train[key]
        if not len(series) or (key == "mfu" and per_token is not None):
            continue
        figure, axes = plain_axes(SMALL_INCHES, palette)
        level = _clip_norm(record) if key == "grad_norm" else None
        span = limits((series,), () if level is None else (level,))
        if noisy:
            _draw_noisy(axes, series, palette)
        else:
            axes.plot(*thinned(series), color=palette.train, lw=1.8)
        if level is not None:
            axes.axhline(level, color=palette.muted, lw=1.1, ls=(0, (4, 3)), label="clipped above")
            axes.legend(loc="upper right", frameon=False, fontsize=8, labelcolor=palette.muted)
        _draw_marks(axes, record, palette)
        if span is not None:
            from_zero = key in ("tokens_per_second", "mfu", "learning_rate", "waited")
            _limit_axes(axes, (0.0, span[1]) if from_zero else span)
        if axes.get_yscale() == "linear":
            axes.yaxis.set_major_formatter(formatter)
        if key == "tokens_per_second" and per_token is not None:
            _add_mfu_axis(axes, per_token, percent, palette)
        figures.append((key, title, figure))
    return figures


def _mfu_per_token(record: RecordedRun) -> float | None:
    """Return MFU ÷ tokens per second if that is constant, so that one curve shows both; else None.
    It changes after a resume on another device, for example."""
    speed, mfu = (record.train[key] for key in ("tokens_per_second", "mfu"))
    if not len(mfu) or speed.steps != mfu.steps or min(speed.values) <= 0:
        return None
    ratios = np.asarray(mfu.values) / np.asarray(speed.values)
    low, high = float(ratios.min()), float(ratios.max())
    return float(np.median(ratios)) if 0 < high <= 1.001 * low else None


def _add_mfu_axis(
    axes: Axes, per_token: float, percent: PercentFormatter, palette: Palette
) -> None:
    """Add an MFU axis at the right, beside tokens per second; per_token: MFU ÷ tokens per
    second."""
    both_ways = (lambda speed: speed * per_token, lambda mfu: mfu / per_token)
    right = axes.secondary_yaxis("right", functions=both_ways)
    right.spines["right"].set_visible(False)
    right.tick_params(axis="y", length=0, labelsize=9, labelcolor=palette.muted, pad=5)
    right.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    right.yaxis.set_major_formatter(percent)


def overlay_figure(
    loss: str,
    runs: Sequence[tuple[str, RecordedRun]],
    *,
    axis: str = "step",
    settled: bool = True,
    unit: str = NATS,
) -> Figure | None:
    """Plot one loss of all runs over an axis, in RUN_STYLES and without a legend; None if no run
    has values.

    loss: a key in LOSSES.
    runs: (label, run) each.
    axis: a key in AXES.
    settled: cut off the fall at the start, if there is one, and note so.
    unit: NATS or BITS. With BITS a run is left out that was never evaluated, since its tokens'
        length is unknown.
    """
    curves = [loss_curve(record, loss, unit) for _, record in runs]
    whole = limits(tuple(curves))
    if whole is None:
        return None
    figure, axes = plain_axes(OVERLAY_INCHES, PAGE)
    for index, ((label, record), series) in enumerate(zip(runs, curves, strict=True)):
        if not len(series):
            continue
        few = len(series) <= 40
        steps, values = thinned(series) if loss == "Validation loss" or few else smoothed(series)
        at = _axis_values(record, axis, steps)
        if index >= len(RUN_STYLES):
            axes.plot(at, values, color=PAGE.muted, lw=0.8, alpha=0.5, zorder=1)
            continue
        colour, dashes = RUN_STYLES[index]
        axes.plot(
            at, values, color=RUN_COLOURS[colour - 1], ls=(0, dashes) if dashes else "-", lw=1.7,
            label=label, marker="o" if few and (not dashes or len(series) < 3) else "", ms=2.6,
            zorder=3 - index / 99,
        )  # fmt: skip
    cut = settled_limits(tuple(curves)) if settled else None
    _limit_axes(axes, cut or whole)
    if cut is not None:
        _note_hidden_start(axes, whole[1], PAGE)
    axes.set_xlabel(AXES[axis], color=PAGE.muted, fontsize=9)
    axes.set_ylabel(unit, color=PAGE.muted, fontsize=9)
    return figure


def loss_curve(record: RecordedRun, loss: str, unit: str) -> Series:
    """Return one loss (a key in LOSSES) of a run as a curve in `unit`. Bits per byte are nats per
    token × the ratio of the two in the run's evaluations, which follows from its tokens' mean
    length; without evaluations the curve is empty."""
    curve = LOSSES[loss](record)
    if unit == NATS:
        return curve
    ratios = [each.bits_per_byte / each.loss for each in record.validations if each.loss > 0]
    ratio = next((each for each in ratios if 0 < each < LARGEST_DRAWN), None)
    if ratio is None:
        return Series()
    values = tuple(value * ratio for value in curve.values)
    return Series(curve.steps, values, curve.n_non_finite)


def hides_start(runs: Sequence[tuple[str, RecordedRun]]) -> bool:
    """Return True if `overlay_figure`, for any kind of loss in these runs, would cut off the steep
    fall at the start."""
    return any(
        settled_limits(tuple(curve(record) for _, record in runs)) for curve in LOSSES.values()
    )


def useful_axes(runs: Sequence[tuple[str, RecordedRun]]) -> list[str]:
    """Return the keys in AXES that the runs should be plotted over: steps; tokens, if the runs
    differ in tokens per step; training time, if all runs have it."""
    found = ["step"]
    if len({record.start.tokens_per_step for _, record in runs}) > 1:
        found.append("tokens")
    found.append("elapsed_seconds")
    return [
        axis for axis in found
        if axis == "step" or all(len(record.train[axis]) for _, record in runs)
    ]  # fmt: skip


def _axis_values(record: RecordedRun, axis: str, steps: np.ndarray) -> np.ndarray:
    """Return each step's position on the axis (a key in AXES), interpolated, (n,)."""
    if axis == "step":
        return steps
    series = record.train[axis]
    return np.interp(steps, (0, *series.steps), (0.0, *series.values))


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure, in the format that the suffix names (svg, png, pdf); return `path`.

    Raises ConfigError for another suffix, StorageError if it cannot be written.
    """
    suffix = path.suffix.lower().lstrip(".")
    if suffix not in ("svg", "png", "pdf"):
        raise ConfigError(f"--plot {path}: the suffix names the format; possible: svg, png, pdf")
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    # the same run, the same bytes
    with storage_errors(path, "write"), mpl.rc_context({"svg.hashsalt": "pentameter"}):
        figure.savefig(path, format=suffix, dpi=200, metadata=metadata)
    return path


def page_svg(figure: Figure, name: str, description: str) -> str:
    """Return a figure, drawn with the palette PAGE, as an SVG element for use inside an HTML page.

    name: unique on the page, letters and hyphens; element ids start with it. description: for
    readers who cannot see the figure; plain words without markup.
    """
    buffer = io.StringIO()
    # text stays text, in the page's font; ids follow from the content and not from chance
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Its style sheet would rule the page's other elements; the page's own has what is needed.
    left_out = r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->\n?"
    svg = re.sub(left_out, "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(id="|xlink:href="#)', rf" \1{name}-", svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    width, height = 72 * figure.get_size_inches()
    opening = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{description}"'
    svg = f"{opening}{_hover_attribute(figure)}>{svg.partition('>')[2].rstrip()}"
    for colour, variable in _PAGE_VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def _hover_attribute(figure: Figure) -> str:
    """Return the SVG attribute `data-hover`, JSON that a script reads to show values on hover; ""
    for a figure without curves. It holds the plot's corners in SVG units, both axes' limits, and
    each curve's label, colour and points."""
    axes = figure.axes[0]
    curves = [
        line for line in axes.get_lines()
        if line.get_linewidth() >= THINNEST_POINTS and np.size(line.get_xdata()) > 1
    ]  # fmt: skip
    if not curves:
        return ""
    width, height = 72 * figure.get_size_inches()
    box = axes.get_position()
    values = {
        "box": [box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height],
        "x": axes.get_xlim(),
        "y": axes.get_ylim(),
        "log": axes.get_yscale() == "log",
        "unit": axes.get_xlabel(),
        "curves": [
            {
                "name": ""
                if _UNNAMED.fullmatch(label := str(line.get_label()))
                else visible(label),
                "colour": line.get_color(),
                "x": line.get_xdata(),
                "y": line.get_ydata(),
            }
            for line in curves
        ],
    }
    text = json.dumps(values, default=_rounded, ensure_ascii=False, separators=(",", ":"))
    return f' data-hover="{escape(text)}"'


def _rounded(array: object) -> list[float | int]:
    """Round an array to five significant digits: a page has many thousands."""
    numbers = [float(f"{value:.5g}") for value in np.asarray(array, dtype=float)]
    return [int(number) if number.is_integer() else number for number in numbers]


def _note_hidden_start(axes: Axes, highest: float, palette: Palette) -> None:
    """Write a note above the plot: curves begin at `highest`, which is above the plot's upper
    edge."""
    words = f"↑ begins at {highest:.2f}, above this axis"
    axes.set_title(words, loc="left", color=palette.muted, fontsize=8)


def entropy_rate(record: RecordedRun) -> float | None:
    """Return the data's entropy rate, the lowest possible loss in nats per token; None if
    unknown."""
    rate = record.start.entropy_rate
    return rate if rate is not None and 0 < rate <= LARGEST_DRAWN else None


def _clip_norm(record: RecordedRun) -> float | None:
    value = as_table(record.config.get("optimizer")).get("clip_norm")
    return float(value) if isinstance(value, int | float) and 0 < value <= LARGEST_DRAWN else None


def plain_axes(size_inches: tuple[float, float], palette: Palette) -> tuple[Figure, Axes]:
    """Return a new figure and its single plot, with steps as x axis, in the page's style."""
    figure = Figure(figsize=size_inches, layout="constrained", facecolor=palette.surface)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor="none")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(palette.grid)
    axes.grid(axis="y", color=palette.grid, lw=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(
        axis="both", which="both", length=0, labelsize=9, labelcolor=palette.muted, pad=5
    )
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("step", color=palette.muted, fontsize=9)
    axes.margins(x=0.015)
    return figure, axes


def _draw_noisy(axes: Axes, series: Series, palette: Palette, label: str | None = None) -> None:
    """Draw a curve's values as a faint line, and a running mean as a strong one; fewer than 30
    values as one line with markers. `label` is the legend's, None for no entry."""
    if not len(series):
        return
    if len(series) < 30:
        x, y = thinned(series)
        axes.plot(x, y, color=palette.train, lw=1.8, marker="o", ms=3, label=label)
        return
    axes.plot(*envelope(series), color=palette.train, lw=0.8, alpha=0.28)
    axes.plot(*smoothed(series), color=palette.train, lw=1.8, label=label and f"{label}, smoothed")


def _draw_marks(
    axes: Axes, record: RecordedRun, palette: Palette, *, labelled: bool = False
) -> None:
    """Draw a vertical line at each resume (dotted), resume in another layout (dots and dashes),
    rollback (dashed) and extension (a bare line), with legend entries if `labelled`."""
    for kind, label, dashes in (
        ("resume", "resumed", (1, 2)),
        ("layout", "resumed in another layout", (6, 2, 1, 2)),
        ("rollback", "rolled back", (4, 2)),
        ("extended", "extended", ()),
    ):
        steps = [step for step, mark, _ in record.marks if mark == kind]
        for index, step in enumerate(steps[:50]):  # more would hide the curve
            axes.axvline(
                step, color=palette.muted, lw=1, ls=(0, dashes or None), zorder=1,
                label=label if labelled and index == 0 else None,
            )  # fmt: skip


def _limit_axes(axes: Axes, span: tuple[float, float]) -> None:
    """Set the y axis to `span` (low, high), logarithmic if high > 30 × low.

    The x axis starts at 0, unless the first point has more than a fifth of the last one's step.
    """
    if axes.dataLim.x0 < 0.2 * axes.dataLim.x1:
        axes.set_xlim(left=0)
    low, high = span
    if low > 0 and high / low > 30:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.3)
        axes.yaxis.set_major_formatter(FuncFormatter(_format_number))
        return
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    axes.set_ylim(low - (0 if low == 0 else margin), high + margin)


def _format_number(value: float, _position: int | None = None) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
