"""Estimated scaling: a configuration's best layouts on 1, 2, 4, … devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pentameter.config.schema import Config
from pentameter.estimating.search.candidates import LayoutCandidate
from pentameter.estimating.search.search import Allowed, all_candidates, fastest
from pentameter.estimating.seconds.cluster import Cluster
from pentameter.estimating.seconds.estimate import Estimate
from pentameter.planning.batch_sizes import global_batch_size

MOST_DEVICES = 16_384
TIMED_OF_EACH = 25
"""Candidates that are timed in full per device count and kind of layout (any, without pipeline,
data alone)."""


@dataclass(frozen=True)
class ScalePoint:
    """The fastest layouts on a number of devices: among all, among those without a pipeline, and
    among those that split only the batch. Each is None where no such layout fits."""

    n_devices: int
    best: Estimate | None
    without_pipeline: Estimate | None
    data_alone: Estimate | None
    """The fastest layout that splits only the batch, with or without ZeRO."""
    efficiency: float
    """Tokens per second per device, relative to the smallest device count that holds the model; 0
    if nothing fits."""
    why: str = ""
    """The reason that no layout was found; empty if one was."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that `plan --scale --json` prints for this device count."""
        kinds = {
            "best": self.best,
            "without_pipeline": self.without_pipeline,
            "data_alone": self.data_alone,
        }
        return {
            "n_devices": self.n_devices,
            "efficiency": self.efficiency,
            "why": self.why,
            **{name: None if each is None else _short(each) for name, each in kinds.items()},
        }


def _short(estimate: Estimate) -> dict[str, Any]:
    return {
        "layout": str(estimate.plan.layout),
        "micro_batch_size": estimate.plan.micro_batch_size,
        "step_seconds": estimate.time.seconds,
        "tokens_per_second": estimate.tokens_per_second,
        "mfu": estimate.mfu,
        "verdict": estimate.verdict,
    }


def scale(
    config: Config,
    cluster: Cluster,
    vocab_size: int | None = None,
    rows_per_epoch: int | None = None,
    *,
    most: int = MOST_DEVICES,
    imbalance: float = 1.0,
    matmuls: str | None = None,
) -> Iterator[ScalePoint]:
    """Yield a ScalePoint for each power of two up to `most` devices, in nodes like those in
    `cluster`. Beyond one node, a point has as many whole nodes as hold that number of devices; if
    no network between nodes is known, a last point says so. The configuration's batch size is kept.

    vocab_size: needed if the configuration sets none.
    rows_per_epoch: batch rows in the training split; needed if the configuration counts in epochs.
    imbalance: the most rows that a rank's experts get ÷ the mean over ranks.
    matmuls: a number format in LINEAR_ONLY for linear layers' matmuls, or None.
    """
    batch_size = global_batch_size(config)
    first = 0.0
    n = 1
    while (resized := cluster.resized(n)).n_devices <= most:
        n_devices = resized.n_devices
        if (obstacle := resized.obstacle) is not None:
            yield ScalePoint(n_devices, None, None, None, 0.0, obstacle)
            return
        every = all_candidates(
            config, resized, vocab_size, rows_per_epoch, imbalance=imbalance, matmuls=matmuls
        )
        kinds: tuple[Allowed, ...] = (lambda _: True, _is_data_alone, _is_flat)
        found = [
            fastest(every, n_best=1, most_timed=TIMED_OF_EACH, allowed=allowed).estimates
            for allowed in kinds
        ]
        _, alone, flat = (estimates[0] if estimates else None for estimates in found)
        best = [estimate for estimates in found for estimate in estimates]
        top = min(best, key=lambda each: (not each.fits, each.time.seconds), default=None)
        if top is None:
            is_small = n_devices < batch_size
            why = "nothing fits" if is_small else "the batch has no more sequences to divide"
            yield ScalePoint(n_devices, None, None, None, 0.0, why)
        else:
            first = first or top.tokens_per_second / n_devices
            efficiency = top.tokens_per_second / n_devices / first
            yield ScalePoint(n_devices, top, flat, alone, efficiency)
        n *= 2


def _is_flat(candidate: LayoutCandidate) -> bool:
    return candidate.step.layout.pipeline == 1


def _is_data_alone(candidate: LayoutCandidate) -> bool:
    layout = candidate.step.layout
    return layout.pipeline == layout.tensor == layout.context == 1
