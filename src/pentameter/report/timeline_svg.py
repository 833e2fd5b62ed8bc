"""A pipeline's schedule as a picture: each process's passes over time, as SVG.

The passes are those that the run executes (`planning/timeline.py`), with the times that the
cluster's devices take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from pentameter.planning.estimate import Estimate
from pentameter.planning.timeline import Span
from pentameter.wording import duration

WIDTH, ROW, GAP, LEFT, TOP = 1200.0, 22.0, 4.0, 92.0, 76.0
LETTER_WIDTH = 0.7
"""Width of a letter ÷ its size, in the widest of the fonts that a browser may take, bold."""
MOST_LABELLED = 4000
"""Passes up to which each shows the number of its micro-batch."""
COLOURS = {
    "forward": ("#4878a8", "#7ba3cc"),
    "backward": ("#5c9e6c", "#93c4a0"),
    "backward_input": ("#5c9e6c", "#93c4a0"),
    "backward_weight": ("#b98b3e", "#d9b878"),
}
"""Kind of a pass → its colour on a process's stages, the first and every other."""
NAMES = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, of inputs",
    "backward_weight": "backward, of weights",
}


def timeline_svg(estimate: Estimate) -> str:
    """The picture of an estimate with a pipeline: a row for each of its processes."""
    spans, layout = estimate.time.spans, estimate.plan.layout
    end = max(span.end for process in spans for span in process)
    height = TOP + len(spans) * (ROW + GAP) + 40
    title = f"{estimate.plan.config.name} · {layout}"
    said = (
        f"{estimate.plan.n_micro_batches} micro-batches of {estimate.plan.micro_batch_size} · "
        f"bubble {estimate.time.bubble_fraction:.1%} of the work"
    )
    n_shown = 1 + max(span.done.micro_batch for process in spans for span in process)
    if n_shown < estimate.plan.n_micro_batches:
        said += f" · the first {n_shown} micro-batches are shown"
    body = "".join(_rows(spans, end, layout.pipeline))
    kinds = dict.fromkeys(span.done.kind for process in spans for span in process)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" '
        'font-family="system-ui, sans-serif" font-size="11" role="img">'
        f"<title>{escape(title)} · {escape(said)}</title>"
        f'<rect width="{WIDTH:g}" height="{height:g}" fill="#ffffff"/>'
        f'<text x="8" y="20" font-size="{_title_size(title):.3g}" font-weight="600" fill="#222">'
        f"{escape(title)}</text>"
        f'<text x="8" y="38" fill="#333">{escape(said)}</text>'
        f"{_legend(list(kinds))}{body}{_axis(end, height)}</svg>\n"
    )


def _title_size(title: str) -> float:
    """The size at which a title is no wider than the picture."""
    return min(14.0, (WIDTH - 16) / (LETTER_WIDTH * len(title)))


def _legend(kinds: Sequence[str]) -> str:
    x, parts = 8.0, []
    for kind in kinds:
        parts.append(
            f'<rect x="{x:g}" y="50" width="12" height="12" fill="{COLOURS[kind][0]}"/>'
            f'<text x="{x + 17:g}" y="60" fill="#333">{NAMES[kind]}</text>'
        )
        x += 30 + 6.2 * len(NAMES[kind])
    return "".join(parts)


def _rows(spans: Sequence[Sequence[Span]], end: float, pipeline: int) -> Iterator[str]:
    scale = (WIDTH - LEFT - 12) / end
    labels = sum(map(len, spans)) <= MOST_LABELLED
    for place, process in enumerate(spans):
        y = TOP + place * (ROW + GAP)
        yield f'<text x="8" y="{y + 15:g}" fill="#333">process {place}</text>'
        yield f'<rect x="{LEFT:g}" y="{y:g}" width="{WIDTH - LEFT - 12:g}" height="{ROW:g}" '
        yield 'fill="#f0f0f0"/>'
        for span in process:
            width = (span.end - span.start) * scale
            if width <= 0:
                continue
            x = LEFT + span.start * scale
            colour = COLOURS[span.done.kind][span.done.stage // pipeline % 2]
            words = (
                f"{NAMES[span.done.kind]}, stage {span.done.stage}, micro-batch "
                f"{span.done.micro_batch}: {duration(span.end - span.start)}"
            )
            yield (
                f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{ROW:g}" '
                f'fill="{colour}" stroke="#fff" stroke-width="0.5">'
                f"<title>{words}</title></rect>"
            )
            number = str(span.done.micro_batch)
            if labels and width > 6.5 * len(number):
                yield (
                    f'<text x="{x + width / 2:.2f}" y="{y + 15:g}" fill="#fff" '
                    f'text-anchor="middle" font-size="10">{number}</text>'
                )


def _axis(end: float, height: float) -> str:
    """Marks of time below the rows."""
    y, parts = height - 22, []
    for part in range(5):
        x = LEFT + (WIDTH - LEFT - 12) * part / 4
        anchor = "start" if part == 0 else "end" if part == 4 else "middle"
        parts.append(
            f'<text x="{x:g}" y="{y + 14:g}" fill="#555" text-anchor="{anchor}">'
            f"{escape(duration(end * part / 4) if part else '0')}</text>"
        )
    return "".join(parts)
