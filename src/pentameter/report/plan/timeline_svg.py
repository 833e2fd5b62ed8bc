"""A pipeline's schedule as an SVG picture: each rank's forward and backward passes over time.

The passes are those that the run executes (`estimating/seconds/timeline.py`), with predicted
durations on the cluster's devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pentameter.estimating.seconds.estimate import Estimate
from pentameter.estimating.seconds.timeline import Span
from pentameter.formatting import duration
from pentameter.report.figures.markup import render

LEFT, TOP, WIDTH, ROW_PITCH = 92.0, 76.0, 1096.0, 26.0
"""The plot's left and top edges and width in the picture (1,200 wide), and the distance between
rows, in SVG units."""
MOST_LABELLED = 4000
"""Number of passes up to which each is labelled with its micro-batch."""
KINDS = {
    "forward": ("forward", "#4878a8", "#7ba3cc"),
    "backward": ("backward", "#5c9e6c", "#93c4a0"),
    "backward_input": ("backward, of inputs", "#5c9e6c", "#93c4a0"),
    "backward_weight": ("backward, of weights", "#b98b3e", "#d9b878"),
}
"""Kind of pass → name, and two colours that alternate between a rank's stages."""


def timeline_svg(estimate: Estimate) -> str:
    """Return as SVG the schedule predicted for a layout with a pipeline, one row per rank."""
    spans, layout = estimate.time.spans, estimate.plan.layout
    passes = [span for rank in spans for span in rank]
    end = max(span.end for span in passes)
    said = (
        f"{estimate.plan.n_micro_batches} micro-batches of {estimate.plan.micro_batch_size} · "
        f"bubble {estimate.time.bubble_fraction:.1%} of the work"
    )
    n_shown = 1 + max(span.done.micro_batch for span in passes)
    if n_shown < estimate.plan.n_micro_batches:
        said += f" · the first {n_shown} micro-batches are shown"
    return render(
        "timeline.svg",
        title=f"{estimate.plan.config.name} · {layout}",
        subtitle=said,
        legend=[KINDS[kind] for kind in dict.fromkeys(span.done.kind for span in passes)],
        left=LEFT,
        width=WIDTH,
        rows=[
            (TOP + rank * ROW_PITCH, list(_drawn(own, WIDTH / end, layout.pipeline)))
            for rank, own in enumerate(spans)
        ],
        bottom=TOP + len(spans) * ROW_PITCH + 40,
        is_labelled=len(passes) <= MOST_LABELLED,
        ticks=[duration(end * quarter / 4) if quarter else "0" for quarter in range(5)],
    )


def _drawn(
    spans: Sequence[Span], scale: float, pipeline: int
) -> Iterator[tuple[float, float, str, str, str]]:
    """Yield (x, width, colour, description, label) for each pass in `spans`, one rank's row of the
    drawing, that takes any time.

    scale: SVG units per second.
    pipeline: the number of pipeline ranks.
    """
    for span in spans:
        seconds, done = span.end - span.start, span.done
        if seconds > 0:
            name, *colours = KINDS[done.kind]
            said = (
                f"{name}, stage {done.stage}, micro-batch {done.micro_batch}: {duration(seconds)}"
            )
            colour = colours[done.stage // pipeline % 2]
            x = LEFT + span.start * scale
            yield x, seconds * scale, colour, said, str(done.micro_batch)
