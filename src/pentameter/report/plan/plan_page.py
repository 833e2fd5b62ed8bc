"""A page about a planned run (verdict, memory, time, schedule, mesh), and a plot that shows how it
scales."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from pentameter.estimating.bytes.stages import stage_tables
from pentameter.estimating.search.scaling import ScalePoint
from pentameter.estimating.search.search import Found, first_change
from pentameter.estimating.seconds.estimate import Estimate
from pentameter.formatting import amount, count, duration, percent, size
from pentameter.report.figures.markup import render, write_page
from pentameter.report.figures.plots import save_figure
from pentameter.report.plan.timeline_svg import timeline_svg

MOST_MESH_ROWS = 64


def verdict(estimate: Estimate, price: float | None = None) -> str:
    """Return a line about a planned run: the verdict on its memory, the predicted step time and
    MFU. If the step count is known, add the run's time and, with a `price` per device-hour, its
    cost."""
    spare = {
        "fits": f" with {size(estimate.spare_bytes)} to spare",
        "tight": f": {size(estimate.spare_bytes)} to spare",
        "does not fit": f": {size(-estimate.spare_bytes)} too much",
    }
    fits = f"{estimate.verdict}{spare[estimate.verdict]}"
    fastest, slowest = map(duration, estimate.seconds_range)
    fewest, most = map(count, estimate.tokens_per_second_range)
    step = (
        f"{fits} · {duration(estimate.time.seconds)} a step ({fastest} to {slowest}) · "
        f"{count(estimate.tokens_per_second)} tokens/s ({fewest} to {most}) · "
        f"MFU {estimate.mfu:.1%}"
    )
    seconds, hours = estimate.run_seconds, estimate.device_hours
    if seconds is None or hours is None:
        return f"{step} · how many steps, the text must tell"
    spent = f"{hours:,.3g} device-hours" if hours < 1000 else f"{hours:,.0f} device-hours"
    money = "" if price is None else f" at {price:g} an hour: {amount(price * hours)}"
    return f"{step} · {duration(seconds)} in all · {spent}{money}"


def time_assumed(estimate: Estimate) -> str:
    """Return a phrase about the range of predicted times: what it assumes, and whether measured
    runs were within it."""
    tested = "four in five of the runs that tested it were within the range of times"
    if estimate.tested_spread is None:
        tested = (
            "no run has tested it here, and the range of times is that of another device's runs"
        )
    return f"assumes {estimate.cluster.device.calibration.assumes}; {tested}"


def first_advice(estimate: Estimate) -> str | None:
    """Return in words the change of one setting that saves most predicted time, and how much; None
    if no change that fits in memory saves 1%."""
    change = first_change(estimate)
    if change is None:
        return None
    words, other = change
    gain = 1 - other.time.seconds / estimate.time.seconds
    return f"{words}: {gain:.0%} less time; --search looks further"


def recomputed(estimate: Estimate) -> str:
    """Return " · recomputes block", for example, to append to a line; "" without activation
    checkpointing."""
    how = estimate.plan.config.train.activation_checkpoint
    return "" if how is None else f" · recomputes {how}"


def imbalance_assumed(estimate: Estimate) -> str:
    """Return the assumption about the router as text to append to a line: " · imbalance 1.25
    assumed"; "" if all experts are on every rank, since no estimate depends on it then."""
    if estimate.plan.layout.expert == 1:
        return ""
    even = " (ranks' experts get equally many tokens)" if estimate.imbalance == 1 else ""
    return f" · imbalance {estimate.imbalance:g} assumed{even}"


def memory_components(estimate: Estimate) -> list[tuple[str, float, str]]:
    """Return (name, bytes, remark) for each component in the fullest rank's predicted memory,
    without those that take 0 bytes."""
    memory = estimate.memory
    parts = [
        ("weights", memory.weights_bytes, ""),
        ("gradients", memory.gradients_bytes, ""),
        ("optimizer", memory.optimizer_bytes, estimate.plan.config.optimizer.name),
        ("gathered", memory.gathered_bytes, "weights whole or rounded, buffers under way"),
        ("messages", memory.received_bytes, "of the pipeline"),
        ("activations", memory.activations_bytes, "of the micro-batches under way"),
    ]
    return [part for part in parts if part[1] > 0]


def time_components(estimate: Estimate) -> list[tuple[str, float, float, str]]:
    """Return (name, seconds, fraction, remark) for each part of the predicted step time: compute,
    bubble, exposed communication, optimizer. Parts below 0.01% are left out."""
    time, links = estimate.time, estimate.links()
    parts = [("compute", time.compute, "")]
    if estimate.plan.layout.pipeline > 1:
        parts.append(("bubble", time.bubble, f"{time.bubble_fraction:.1%} of the work"))
    for name, seconds in time.exposed.items():
        link = links.get(name, "all processes")
        hidden = time.hidden.get(name, 0.0)
        overlapped = f", {hidden:.3g} s more beside compute" if hidden else ""
        parts.append((f"waiting: {name}", seconds, link + overlapped))
    parts.append(("optimizer", time.optimizer, estimate.plan.config.optimizer.name))
    return [
        (name, seconds, seconds / time.seconds, remark)
        for name, seconds, remark in parts
        if seconds > 1e-4 * time.seconds
    ]


def layout_rows(found: Found) -> list[tuple[str, ...]]:
    """Return, for each layout that a search found, its name, micro-batch size × number,
    recomputation, seconds per step, MFU and spare memory (marked where it is tight), as text."""
    return [
        (
            str(estimate.plan.layout),
            f"{estimate.plan.micro_batch_size} × {estimate.plan.n_micro_batches}",
            str(estimate.plan.config.train.activation_checkpoint or "nothing"),
            f"{estimate.time.seconds:.4g}",
            percent(estimate.mfu),
            size(estimate.spare_bytes) + (", tight" if estimate.verdict == "tight" else ""),
        )
        for estimate in found.estimates
    ]


def write_plan_page(
    path: Path, estimate: Estimate, found: Found | None, price: float | None
) -> Path:
    """Write the page about a planned run to `path` and return `path`. found: a search's result to
    list; price: money per device-hour. Raises StorageError."""
    plan, cluster = estimate.plan, estimate.cluster
    usable = cluster.usable_bytes
    peak = ("peak", estimate.device_bytes, f"of {size(usable)} usable")
    memory = [
        (name, size(n_bytes), 100 * min(1.0, n_bytes / usable), remark)
        for name, n_bytes, remark in [*memory_components(estimate), peak]
    ]
    seconds = [
        (name, duration(value), 100 * share, remark)
        for name, value, share, remark in time_components(estimate)
    ]
    advice = None if found is not None else first_advice(estimate)
    page = render(
        "plan.html",
        name=plan.config.name,
        cluster=str(cluster),
        verdict=verdict(estimate, price),
        subtitle=f"{plan.layout} · {cluster.n_devices:,} × "
        f"{cluster.device.name or cluster.device_key}, {cluster.node_size} a node · "
        f"{estimate.precision}{recomputed(estimate)}{imbalance_assumed(estimate)}",
        facts=list(_facts(estimate)),
        advice=[*filter(None, [advice]), *estimate.warnings()],
        memory=memory,
        time=seconds,
        layouts=[] if found is None else layout_rows(found),
        timeline=Markup(timeline_svg(estimate)) if plan.layout.pipeline > 1 else "",
        mesh=list(_mesh(estimate)),
        mesh_note=_mesh_note(estimate),
        device_source=f"{cluster.device.source} ({cluster.device.date})",
        calibration=cluster.device.calibration.fitted_on,
        assumed=time_assumed(estimate),
    )
    return write_page(path, page)


def _facts(estimate: Estimate) -> Iterator[tuple[str, str, str]]:
    plan = estimate.plan
    yield "Parameters", count(plan.n_parameters), f"{plan.n_parameters:,}"
    fastest, slowest = map(duration, estimate.seconds_range)
    yield "A step", duration(estimate.time.seconds), f"{fastest} to {slowest}"
    yield "Tokens a step", count(plan.tokens_per_step), f"{plan.tokens_per_step:,}"
    if estimate.run_seconds is not None:
        yield "The run", duration(estimate.run_seconds), f"{plan.steps:,} steps"
    fewest, most = map(count, estimate.tokens_per_second_range)
    yield "Tokens per second", count(estimate.tokens_per_second), f"{fewest} to {most}"
    yield "MFU", percent(estimate.mfu), "of the published peak"
    yield "Memory", size(estimate.device_bytes), f"of {size(estimate.cluster.usable_bytes)}"
    yield "Micro-batch", str(plan.micro_batch_size), f"sequences; {plan.n_micro_batches} a step"
    if plan.layout.pipeline > 1:
        yield "Bubble", percent(estimate.time.bubble_fraction), "of the work"


def _mesh(estimate: Estimate) -> Iterator[tuple[str, str, str, str]]:
    """Yield, for each pipeline coordinate of the planned layout, (ranks, nodes, layers, parameters
    per rank) as text for the page's table."""
    plan, layout = estimate.plan, estimate.plan.layout
    each = layout.world_size // layout.pipeline
    for coordinate in range(min(layout.pipeline, MOST_MESH_ROWS)):
        first = layout.rank_of(pipeline=coordinate)
        last = first + each - 1
        nodes = sorted({first // estimate.cluster.node_size, last // estimate.cluster.node_size})
        layers = ", ".join(
            f"{plan.stages[n].start}–{plan.stages[n].stop - 1}"
            for n in layout.stages_of(coordinate)
        )
        tables = stage_tables(plan.config, layout, plan.stages, coordinate)
        n = sum(
            math.prod(plan.sharding.parameter_shape(spec)) for _, table in tables for spec in table
        )
        yield (
            f"{first}–{last}" if each > 1 else str(first),
            "–".join(map(str, nodes)),
            layers,
            count(n),
        )


def _mesh_note(estimate: Estimate) -> str:
    sizes = estimate.plan.layout.sizes
    used = [f"{name} {degree}" for name, degree in sizes.items() if degree > 1]
    order = " × ".join(used) or "one process"
    return f"Ranks count {order}, row by row: neighbouring ranks differ in the last."


def write_scale_figure(path: Path, name: str, points: Sequence[ScalePoint]) -> Path:
    """Plot tokens per second and efficiency over device counts into `path`; return `path`.

    The suffix sets the format: .svg, .png or .pdf. Raises ConfigError for another, and
    StorageError.
    """
    return save_figure(scale_figure(name, points), path)


def scale_figure(name: str, points: Sequence[ScalePoint]) -> Figure:
    """Plot predicted tokens per second over device counts, for the best layout, the best without
    pipeline and data parallelism alone. Next to them plot their efficiency: tokens per second and
    device, divided by the first point's."""
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    speed, efficiency = figure.subplots(1, 2)
    base = 0.0
    known = [point for point in points if point.best is not None]
    kinds = (
        ("best layout", "best", "-", "#2f6bdb"),
        ("without pipeline", "without_pipeline", "--", "#dd6b10"),
        ("data alone", "data_alone", ":", "#138a5e"),
    )
    for label, key, style, colour in kinds:
        pairs = [
            (point.n_devices, found.tokens_per_second)
            for point in known
            if (found := getattr(point, key)) is not None
        ]
        if not pairs:
            continue
        devices, rates = zip(*pairs, strict=True)
        base = base or rates[0] / devices[0]  # the first kind's, on the fewest devices
        fractions = [rate / n / base for n, rate in pairs]
        for axes, values in ((speed, rates), (efficiency, fractions)):
            axes.plot(devices, values, style, color=colour, marker="o", ms=3, label=label)
    for axes, title in ((speed, "tokens per second"), (efficiency, "efficiency")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        axes.set_xlabel("devices")
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    speed.set_yscale("log")
    speed.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    speed.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: count(rate)))
    speed.yaxis.set_minor_formatter(NullFormatter())
    efficiency.set_ylim(0, 1.05)
    efficiency.yaxis.set_major_formatter(PercentFormatter(1))
    speed.legend(frameon=False, fontsize=9)
    figure.suptitle(name, fontsize=11, x=0.01, ha="left")
    return figure
