"""What a run remembers between steps, beside weights and optimizer: small, plain, saved as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pentameter.optim.clip import LossScale
from pentameter.parallel.assemble import LossSum


@dataclass
class EpochSums:
    """What the running epoch has added up, step by step; skipped updates count nowhere."""

    loss: float = 0.0
    n_targets: int = 0
    n_steps: int = 0
    seconds: float = 0.0

    def add(self, loss: LossSum, seconds: float) -> None:
        """Count a step."""
        self.loss += loss.total
        self.n_targets += loss.n_targets
        self.n_steps += 1
        self.seconds += seconds

    def reset(self) -> None:
        """Begin the next epoch."""
        self.loss, self.n_targets, self.n_steps, self.seconds = 0.0, 0, 0, 0.0


@dataclass
class TrainState:
    """Mutable, and complete: what is not here or in the tensors does not survive a resume."""

    step: int = 0
    """Optimizer steps completed."""
    tokens: int = 0
    """Target tokens trained on."""
    train_seconds: float = 0.0
    """Time spent in steps, over all starts."""
    last_eval_step: int = -1
    last_sample_step: int = -1
    best_step: int | None = None
    best_loss: float | None = None
    evals_without_best: int = 0
    consecutive_skips: int = 0
    proved_step: int | None = None
    """The newest checkpoint from whose weights something finite was computed; see `saving.py`."""
    loss_scale: LossScale = field(default_factory=LossScale)
    epoch: EpochSums = field(default_factory=EpochSums)

    def to_json(self) -> dict[str, Any]:
        """The state as checkpoints keep it; `best` is where readers look for the best step."""
        record = asdict(self)
        record["best"] = (
            None if self.best_step is None else {"step": self.best_step, "loss": self.best_loss}
        )
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TrainState:
        """The state `to_json` wrote; what an earlier version did not know is as at the start."""
        values = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        values["loss_scale"] = LossScale(**record["loss_scale"])
        values["epoch"] = EpochSums(**record.get("epoch", {}))
        return cls(**values)

    def is_due(self, interval: int | None, last_step: int, n_steps: int) -> bool:
        """Whether what is done every `interval` steps, and at the end of the run's `n_steps`, is
        still to do now; it was last done at `last_step`."""
        if interval is None or last_step == self.step:
            return False
        return self.step % interval == 0 or self.step == n_steps

    def record_eval(self, loss: float, *, trained: bool) -> bool:
        """Count an evaluation; whether its loss is the best so far.

        That of a model not yet `trained` is never the best: there is nothing worth keeping.
        """
        self.last_eval_step = self.step
        if not trained or not math.isfinite(loss):
            return False
        if self.best_loss is None or loss < self.best_loss:
            self.best_step, self.best_loss, self.evals_without_best = self.step, loss, 0
            return True
        self.evals_without_best += 1
        return False
