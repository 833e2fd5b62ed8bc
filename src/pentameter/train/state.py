"""What a run remembers between steps, beside weights and optimizer: small, plain, saved as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pentameter.optim.clip import LossScale


@dataclass
class TrainState:
    """Mutable, and complete: what is not here or in the tensors does not survive a resume."""

    step: int = 0
    """Optimizer steps completed."""
    tokens: int = 0
    """Tokens trained on."""
    train_seconds: float = 0.0
    """Time spent in steps, over all starts."""
    last_eval_step: int = -1
    last_sample_step: int = -1
    best_step: int | None = None
    best_loss: float | None = None
    evals_without_best: int = 0
    consecutive_skips: int = 0
    loss_scale: LossScale = field(default_factory=LossScale)

    def to_json(self) -> dict[str, Any]:
        """The state as checkpoints keep it; `best` is where readers look for the best step."""
        record = asdict(self)
        record["best"] = (
            None if self.best_step is None else {"step": self.best_step, "loss": self.best_loss}
        )
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TrainState:
        """The state `to_json` wrote."""
        names = cls.__dataclass_fields__.keys()
        values = {name: record[name] for name in names if name != "loss_scale"}
        return cls(**values, loss_scale=LossScale(**record["loss_scale"]))

    def record_eval(self, loss: float) -> bool:
        """Count an evaluation; whether its loss is the best so far.

        The untrained model's is never the best: there is nothing of it worth keeping.
        """
        self.last_eval_step = self.step
        if self.step == 0 or not math.isfinite(loss):
            return False
        if self.best_loss is None or loss < self.best_loss:
            self.best_step, self.best_loss, self.evals_without_best = self.step, loss, 0
            return True
        self.evals_without_best += 1
        return False
