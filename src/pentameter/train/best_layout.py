"""`train --layout best`: the fastest layout for a configuration on the processes that were
started."""

from __future__ import annotations

from dataclasses import dataclass

from pentameter.config.schema import Config
from pentameter.data.sizes import DataSizes
from pentameter.errors import ConfigError
from pentameter.estimating.estimate import Estimate
from pentameter.estimating.search import search, why_nothing_fits
from pentameter.machine.this_cluster import this_cluster


@dataclass(frozen=True)
class BestLayout:
    """The fastest layout that fits in memory. `estimate` holds its Plan and the predicted, not
    measured, step time and memory; `n_candidates` is the number of layouts it was chosen from."""

    estimate: Estimate
    n_candidates: int

    def of(self, config: Config) -> Config:
        """Return `config` with this layout's parallel degrees, its micro-batch size (sequences per
        forward and backward pass) and its activation checkpointing."""
        chosen = self.estimate.plan.config
        train = config.train.model_copy(
            update={
                "micro_batch_size": self.estimate.plan.micro_batch_size,
                "activation_checkpoint": chosen.train.activation_checkpoint,
            }
        )
        return config.model_copy(update={"parallel": chosen.parallel, "train": train})

    def __str__(self) -> str:
        plan, device = self.estimate.plan, self.estimate.cluster.device
        return (
            f"the best of {self.n_candidates:,} layouts is {plan.layout}, "
            f"{plan.micro_batch_size} sequences at a time: {self.estimate.time.seconds:.3g} s a "
            f"step planned on {device.name or self.estimate.cluster.device_key}"
        )


def best_layout(config: Config, sizes: DataSizes, world_size: int, local_size: int) -> BestLayout:
    """Search all layouts on `world_size` processes for the one with the shortest predicted step on
    this machine's devices.

    `local_size` processes run on each machine. `sizes` gives the vocabulary and the batch rows per
    epoch, as `data_sizes(config)` returns them. No step is run. Raises ConfigError if no layout
    fits in memory.
    """
    cluster, _ = this_cluster(world_size, local_size)
    found = search(config, cluster, sizes.vocab_size, sizes.rows_per_epoch, n_best=2)
    if not found.estimates:
        raise ConfigError(f"--layout best: {why_nothing_fits(config, cluster, found)}")
    return BestLayout(found.estimates[0], found.n_candidates)
