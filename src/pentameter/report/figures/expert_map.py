"""The loads of a mixture's experts as a picture: for each layer a map with a row for each expert
and time from left to right.

The map is an SVG with one path for each level of load, whose colours are the page's own, so that
one drawing serves light and dark.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pentameter import formatting
from pentameter.record.curves import evenly
from pentameter.record.expert_loads import LayerLoads

EDGES = (0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 4.0)
"""Borders between the eight levels of an expert's load ÷ the mean load; the style sheet has a
colour for each level."""
MOST_COLUMNS, MOST_NARROW_COLUMNS = 200, 100
"""Most recorded steps that a wide and a narrow map show: about as many as can be told apart."""
MAP_PIXELS, FEWEST_ROW_PIXELS, MOST_ROW_PIXELS = 160, 1.5, 14
"""Height of a map on the page, and the least and most height of one expert's row."""
MOST_NAMED = 6
"""Most idle experts that are named above a map."""
FEW_LAYERS = 6
"""Up to so many layers, maps are in two wide columns; with more they are narrow."""


@dataclass(frozen=True)
class ExpertMap:
    """The picture of one layer's experts for a run's HTML page, as the values that its template
    needs: a row for each expert, steps from left to right, a darker colour for a higher load. A
    frozen record."""

    title: str
    detail: str
    """The busiest expert's load, which experts are idle, the router's logits and the bytes that
    were exchanged, at the last recorded step."""
    n_experts: int
    """Number of rows, one per expert."""
    first_step: int
    """The step at the left edge: the one before the first recorded step."""
    last_step: int
    """The step at the right edge, the last recorded one."""
    height_pixels: float
    """Height on the page, all rows together."""
    paths: tuple[tuple[str, str], ...]
    """(Style class, SVG path) for each level of load: `idle`, or `load-1` (lowest) to `load-8`. In
    a path, x is in steps after `first_step`, y in experts."""


def expert_maps(layers: Sequence[LayerLoads]) -> list[ExpertMap]:
    """Return a map for each layer, to be drawn on the page. Each shows at most MOST_COLUMNS
    recorded steps, evenly chosen, or MOST_NARROW_COLUMNS if there are more than FEW_LAYERS
    layers."""
    n_columns = MOST_COLUMNS if len(layers) <= FEW_LAYERS else MOST_NARROW_COLUMNS
    return [_map(layer, n_columns) for layer in layers]


def _map(layer: LayerLoads, n_columns: int) -> ExpertMap:
    """Return a layer's map from at most `n_columns` recorded steps, evenly chosen."""
    kept = evenly(len(layer.steps), n_columns)
    steps = [layer.steps[at] for at in kept]
    relative = layer.relative[kept]
    levels = np.searchsorted(EDGES, relative) + 1
    levels[relative == 0] = 0
    # A record stands for the steps since the one before; the first for as many as the second.
    first = max(0, 2 * steps[0] - steps[1]) if len(steps) > 1 else steps[0] - 1
    paths: dict[int, list[str]] = defaultdict(list)
    for expert in range(relative.shape[1]):
        for level, start, stop in _runs(levels[:, expert]):
            left = steps[start - 1] if start else first
            paths[level].append(f"M{left - first} {expert + 0.5:g}h{steps[stop - 1] - left}")
    n_experts = relative.shape[1]
    row = min(MOST_ROW_PIXELS, max(FEWEST_ROW_PIXELS, MAP_PIXELS / n_experts))
    return ExpertMap(
        title=f"Layer {layer.layer}",
        detail=_detail(layer),
        n_experts=n_experts,
        first_step=first,
        last_step=steps[-1],
        height_pixels=row * n_experts,
        paths=tuple(
            ("idle" if level == 0 else f"load-{level}", "".join(lines))
            for level, lines in sorted(paths.items(), reverse=True)  # idle ones on top
        ),
    )


def _runs(levels: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield (level, index of its first entry, index after its last) for each stretch of equal
    entries in `levels` (n,)."""
    bounds = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist(), len(levels)]
    for start, stop in itertools.pairwise(bounds):
        yield int(levels[start]), start, stop


def _detail(layer: LayerLoads) -> str:
    """Return a line about a layer's last recorded step: the largest load ÷ mean, the numbers of the
    experts without any token, at most MOST_NAMED, and, if recorded, the logits' size and the bytes
    exchanged."""
    relative = layer.relative[-1]
    words = [f"busiest {formatting.fixed(float(relative.max()), 2)}× the mean"]
    if idle := np.flatnonzero(relative == 0).tolist():
        named = ", ".join(map(str, idle[:MOST_NAMED])) + (" …" if len(idle) > MOST_NAMED else "")
        words.append(f"{len(idle)} idle: {named}")
    if layer.z[-1] >= 0:  # NaN is not
        logits, z = (formatting.fixed(each[-1], 2) for each in (layer.logit_rms, layer.z))
        words.append(f"logits {logits} rms, z {z}")
    if layer.exchanged_bytes[-1] > 0:
        words.append(f"{formatting.size(layer.exchanged_bytes[-1])} exchanged")
    return " · ".join(words)
