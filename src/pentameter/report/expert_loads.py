"""The loads of a mixture's experts as a run recorded them, and as a picture: for each layer a map
with a row for each expert and time from left to right.

The map is an SVG with one path for each level of load, whose colours are the page's own, so that
one drawing serves light and dark.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pentameter import formatting
from pentameter.record.curves import evenly
from pentameter.record.event_reader import number

EDGES = (0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 4.0)
"""Loads ÷ mean between two levels; the style sheet has a colour for each of the eight."""
MOST_COLUMNS, MOST_NARROW_COLUMNS = 200, 100
"""Most recorded steps that a wide and a narrow map show: about as many as can be told apart."""
MAP_PIXELS, FEWEST_ROW_PIXELS, MOST_ROW_PIXELS = 160, 1.5, 14
"""Height of a map on the page, within bounds for the row of one expert."""
MOST_NAMED = 6
"""Most idle experts that are named above a map."""
FEW_LAYERS = 6
"""Most layers whose maps stand in two wide columns; of more they are narrow."""


@dataclass(frozen=True)
class LayerLoads:
    """Tokens that chose each expert in one layer, at n recorded steps: each step's own number, not
    a sum over the steps between."""

    layer: int
    steps: tuple[int, ...]
    loads: tuple[tuple[float, ...], ...]
    """(n, experts), 0 or more; no row is 0 throughout."""
    z: tuple[float, ...]
    """Mean squared log-sum-exp of the router's logits, (n,); NaN where none is recorded."""
    logit_rms: tuple[float, ...]
    """Root mean square of the router's logits, (n,); NaN where none is recorded."""
    exchanged_bytes: tuple[float, ...]
    """Bytes that ranks sent one another in the step, (n,); NaN where none are recorded."""

    @property
    def relative(self) -> np.ndarray:
        """Loads ÷ the mean over the layer's experts, (n, experts)."""
        loads = np.asarray(self.loads)
        relative: np.ndarray = loads / loads.mean(1, keepdims=True)
        return relative

    @property
    def recent(self) -> np.ndarray:
        """Loads ÷ the mean over the layer's experts, (m, experts), in the last m recorded steps: n
        / 20, at least one."""
        return self.relative[-max(1, len(self.steps) // 20) :]


def layer_loads(events: Sequence[Mapping[str, Any]]) -> tuple[LayerLoads, ...]:
    """Return the loads recorded in `experts` events, one result per layer, in the layers' order.
    The events are dicts with `step`, `layer` and `loads` (tokens per expert), sorted by step. Left
    out are events without valid loads, with no load at all, or with another number of experts than
    their layer's first."""
    of_layer: dict[int, dict[int, tuple[list[float], Mapping[str, Any]]]] = defaultdict(dict)
    for event in events:
        layer, loads = event.get("layer"), event.get("loads")
        if not isinstance(layer, int) or not isinstance(loads, list):
            continue
        values = [number(load) for load in loads]
        if 0 < sum(values) < np.inf and min(values) >= 0:  # NaN is not
            of_layer[layer][event["step"]] = values, event
    found = []
    for layer, rows in sorted(of_layer.items()):
        n_experts = len(next(iter(rows.values()))[0])
        kept = {step: row for step, row in rows.items() if len(row[0]) == n_experts}
        loads = tuple(tuple(values) for values, _ in kept.values())
        further = {
            key: tuple(number(event.get(key)) for _, event in kept.values())
            for key in ("z", "logit_rms", "exchanged_bytes")
        }
        found.append(LayerLoads(layer, tuple(kept), loads, **further))
    return tuple(found)


def imbalance(layers: Sequence[LayerLoads]) -> float:
    """Return the busiest expert's load ÷ the mean over its layer's experts: 1 if all are equal. It
    is averaged over layers, and over the last twentieth of the recorded steps; NaN without
    layers."""
    return float(np.mean([each.recent.max(1).mean() for each in layers] or np.nan))


def n_idle(layers: Sequence[LayerLoads]) -> int | None:
    """Return how many experts, added over all layers, no token chose at any step in the last
    twentieth of the recorded ones; None without layers."""
    return sum(int((each.recent.max(0) == 0).sum()) for each in layers) if layers else None


def mean_z(layers: Sequence[LayerLoads]) -> float:
    """Return the mean over layers of `z` at the last recorded step; NaN if none is recorded."""
    return float(np.mean([each.z[-1] for each in layers] or np.nan))


def total_exchanged(layers: Sequence[LayerLoads]) -> float:
    """Return the bytes that ranks sent one another for experts in the last recorded step, all
    layers together; NaN if none are recorded."""
    return float(np.sum([each.exchanged_bytes[-1] for each in layers] or np.nan))


@dataclass(frozen=True)
class ExpertMap:
    """A layer's map, ready for the page's template: a row for each expert, steps from left to
    right."""

    title: str
    detail: str
    """The busiest expert's load, which experts are idle, the router's logits and the bytes that
    were exchanged, at the last recorded step."""
    n_experts: int
    """Number of rows, one per expert."""
    first_step: int
    """The step at the left edge, before the first recorded one."""
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
    """Yield (level, first index, index after the last) for each run of equal levels (n,)."""
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
