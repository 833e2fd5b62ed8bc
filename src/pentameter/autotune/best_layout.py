"""`train --layout best`: the fastest layout for a configuration on the processes that were
started.

Under a launcher rank 0 searches, and tells the others what it has chosen: machines that differ, or
a calibration that only one of them has, would have ranks choose differently.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pentameter.config.files.load import load_config
from pentameter.config.schema import Config
from pentameter.data.sizes import DataSizes, data_sizes
from pentameter.errors import ConfigError, remark
from pentameter.estimating.search.search import search, why_nothing_fits
from pentameter.estimating.seconds.estimate import Estimate
from pentameter.formatting import size
from pentameter.machine.this_cluster import this_cluster
from pentameter.planning.layouts.layout import layout_settings
from pentameter.processes.group.join import Meeting
from pentameter.processes.group.rank import LaunchedRank

_CHOICE = "layout"


@dataclass(frozen=True)
class BestLayout:
    """The fastest layout that fits in memory, or if none does the fastest of those that are tight.
    `estimate` holds its Plan, and step time and memory as predicted, not measured. `n_candidates`
    layouts were compared. `n_spare` processes are left over, which no layout could use."""

    estimate: Estimate
    n_candidates: int
    n_spare: int = 0

    @property
    def n_processes(self) -> int:
        """Number of processes that train: the layout's."""
        return self.estimate.plan.layout.world_size

    def of(self, config: Config) -> Config:
        """Return `config` with this layout's parallel degrees, its micro-batch size (sequences per
        forward and backward pass) and its activation checkpointing."""
        return load_config(config, self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that state the layout, the micro-batch and the checkpointing."""
        plan = self.estimate.plan
        return {**layout_settings(plan.config), "train.micro_batch_size": plan.micro_batch_size}

    def __str__(self) -> str:
        plan, device = self.estimate.plan, self.estimate.cluster.device
        spare = ""
        if self.n_spare:
            n, are = self.n_spare + self.n_processes, "is" if self.n_spare == 1 else "are"
            spare = f"; {self.n_spare} of {n} processes {are} spare, as no layout divides by {n}"
        if self.estimate.verdict == "tight":
            spare += (
                f"; tight: {size(self.estimate.spare_bytes)} of memory to spare, and no layout "
                "leaves more than a run may need beyond its plan"
            )
        return (
            f"the best of {self.n_candidates:,} layouts is {plan.layout}, "
            f"{plan.micro_batch_size} sequences at a time: {self.estimate.time.seconds:.3g} s a "
            f"step planned on {device.name or self.estimate.cluster.device_key}{spare}"
        )


def best_layout(
    config: Config,
    world_size: int = 1,
    local_size: int | None = None,
    sizes: DataSizes | None = None,
) -> BestLayout:
    """Search all layouts on `world_size` processes for the one with the shortest predicted step on
    this machine's devices. No step is run. If no layout splits the step over so many processes,
    search on the largest number that one does, in whole machines if there are several; the other
    processes are spare. Raises ConfigError if no layout fits in memory.

    local_size: processes on each machine; None: all on this one.
    sizes: vocabulary and batch rows per epoch, if the caller has already looked for them.
    """
    local_size, sizes = local_size or world_size, sizes or data_sizes(config)
    reason = ""
    for n in range(world_size, 0, -1):
        if n > local_size and n % local_size:
            continue
        cluster, _ = this_cluster(n, min(n, local_size))
        found = search(config, cluster, sizes.vocab_size, sizes.rows_per_epoch, n_best=2)
        if found.estimates:
            return BestLayout(found.estimates[0], found.n_candidates, world_size - n)
        reason = reason or why_nothing_fits(config, cluster, found)
        if found.n_legal:  # they exceed the memory, and fewer processes have less
            break
    raise ConfigError(f"--layout best: {reason}")


def choose_together(
    config: Config, meeting: Meeting, sizes: Callable[[], DataSizes]
) -> tuple[Config, LaunchedRank]:
    """Choose the best layout for the processes that have met, on rank 0. Return, on every rank,
    `config` in this layout and the rank's LaunchedRank among those that train. If its rank is not
    below its `world_size`, this process is a spare and has nothing to do. Collective.

    `sizes` is called on rank 0. Raises ConfigError there if no layout fits, and LostProcessError
    elsewhere if rank 0 does not choose.
    """
    launched = meeting.launched
    if launched.rank == 0:
        best = best_layout(config, launched.world_size, launched.local_size, sizes())
        remark(str(best))
        told = {"n_processes": best.n_processes, "settings": best.settings}
        meeting.tell(_CHOICE, json.dumps(told))
    told = json.loads(meeting.read(_CHOICE))
    n = int(told["n_processes"])
    here = max(1, min(launched.local_size, n - (launched.rank - launched.local_rank)))
    training = replace(launched, world_size=n, local_size=here)
    return load_config(config, told["settings"]), training
