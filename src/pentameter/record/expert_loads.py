"""The loads of a mixture's experts, as a run recorded them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pentameter.record.events import ExpertMetrics


@dataclass(frozen=True)
class LayerLoads:
    """Number of tokens that chose each expert in one layer, at n recorded steps. Steps between
    these are not counted. A frozen record."""

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


def layer_loads(events: Sequence[ExpertMetrics]) -> tuple[LayerLoads, ...]:
    """Return the loads recorded in `experts` events, sorted by step: one result per layer, in the
    layers' order. Events are left out that have no valid loads, no load at all, or another number
    of experts than their layer's first."""
    of_layer: dict[int, list[ExpertMetrics]] = defaultdict(list)
    for event in events:
        # NaN is not.
        if event.layer >= 0 and 0 < sum(event.loads) < np.inf and min(event.loads) >= 0:
            of_layer[event.layer].append(event)
    found = []
    for layer, all_events in sorted(of_layer.items()):
        n_experts = len(all_events[0].loads)
        kept = [each for each in all_events if len(each.loads) == n_experts]
        found.append(
            LayerLoads(
                layer,
                steps=tuple(each.step for each in kept),
                loads=tuple(each.loads for each in kept),
                z=tuple(each.z for each in kept),
                logit_rms=tuple(each.logit_rms for each in kept),
                exchanged_bytes=tuple(each.exchanged_bytes for each in kept),
            )
        )
    return tuple(found)


def imbalance(layers: Sequence[LayerLoads]) -> float:
    """Return the busiest expert's load ÷ the mean over its layer's experts: 1 if all are equal. It
    is averaged over layers, and over the last twentieth of the recorded steps; NaN without
    layers."""
    return float(np.mean([each.recent.max(1).mean() for each in layers] or np.nan))


def n_idle(layers: Sequence[LayerLoads]) -> int | None:
    """Return the number of experts, over all layers, that no token chose in the last twentieth of
    the recorded steps; None without layers."""
    return sum(int((each.recent.max(0) == 0).sum()) for each in layers) if layers else None


def mean_z(layers: Sequence[LayerLoads]) -> float:
    """Return the mean over layers of `z`, the mean squared log-sum-exp of the router's logits, at
    the last recorded step; NaN if none is recorded."""
    return float(np.mean([each.z[-1] for each in layers] or np.nan))


def total_exchanged(layers: Sequence[LayerLoads]) -> float:
    """Return the bytes that ranks sent one another for experts in the last recorded step, all
    layers together; NaN if none are recorded."""
    return float(np.sum([each.exchanged_bytes[-1] for each in layers] or np.nan))
