"""A run's state besides weights and optimizer, which checkpoints keep as state.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from pentameter.checkpoint.folders.opening import STATE_NAME, Checkpoint
from pentameter.config.section import NonNegative, NonNegativeFloat
from pentameter.errors import CorruptError
from pentameter.parallel.engine import LossSum
from pentameter.parallel.precision import LossScale

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
StepIfAny = Annotated[int, Field(ge=-1, le=2**31 - 1)]  # -1 for never


@dataclass
class EpochSums:
    """Sums over the current epoch's steps whose update was made: `loss` in nats, summed over target
    tokens; `n_targets`, target tokens; `n_steps`, steps; `seconds`, their time."""

    loss: Finite = 0.0
    n_targets: Count = 0
    n_steps: NonNegative = 0
    seconds: NonNegativeFloat = 0.0

    def add(self, loss: LossSum, seconds: float) -> None:
        """Add a step's loss, whose numbers are already on the host, and its time."""
        self.loss += float(loss.total)
        self.n_targets += int(loss.n_targets)
        self.n_steps += 1
        self.seconds += seconds


@dataclass
class GuardState:
    """The guard's memory of earlier steps, kept in checkpoints so that a resumed run decides as one
    that never stopped (see `guard.py` and `skipping.py`). `losses` and `norms` are kept only with
    `guard.spike_factor`, the other fields only with `guard.rollback_interval`."""

    losses: list[Finite] = field(default_factory=list)
    """Loss of each of the last `guard.window` updates, oldest first."""
    norms: list[Finite] = field(default_factory=list)
    """Gradient norm before clipping of each of them."""
    rollback_steps: list[NonNegative] = field(default_factory=list)
    """Steps whose checkpoints the run may roll back to, oldest first."""
    undone: list[tuple[NonNegative, NonNegative]] = field(default_factory=list)
    """(First step, last step) of each stretch that a rollback has undone. The batches of these
    steps are not read again: step n reads batch n - 1."""

    def add(self, loss: float, norm: float, window: int) -> None:
        """Add the loss and the gradient norm of a step whose update was made to the history, and
        drop the oldest beyond `window` steps."""
        for history, value in ((self.losses, loss), (self.norms, norm)):
            history.append(value)
            del history[:-window]


@dataclass
class TrainState:
    """All that a run keeps from step to step besides tensors (weights and optimizer state); a
    checkpoint has both. Steps are counts of completed steps; -1 means never.

    `best_step` and `best_loss` belong to the lowest validation loss and are None before the first
    evaluation. `evals_without_best` is the number of evaluations since then, `consecutive_skips`
    the number of latest steps in a row whose update was left out.
    """

    step: NonNegative = 0
    """Optimizer steps completed."""
    tokens: Count = 0
    """Loss tokens so far: those that counted in the loss."""
    train_seconds: NonNegativeFloat = 0.0
    """Seconds spent in steps, over all starts."""
    last_eval_step: StepIfAny = -1
    last_sample_step: StepIfAny = -1
    best_step: NonNegative | None = None
    saved_best_step: NonNegative | None = None
    """The step of the newest checkpoint that was the best when saved; None without one."""
    best_loss: Finite | None = None
    best_of: str = "val"
    """The split of the best loss: `val`, or `val-sample` and its tokens. Losses of two are
    never compared."""
    evals_without_best: NonNegative = 0
    consecutive_skips: NonNegative = 0
    proved_step: NonNegative | None = None
    """The step of the newest known good checkpoint: a loss computed from its weights was finite
    (see `saving.py`). None without one."""
    loss_scale: LossScale = field(default_factory=LossScale)
    epoch: EpochSums = field(default_factory=EpochSums)
    guard: GuardState = field(default_factory=GuardState)

    def for_branch(self) -> TrainState:
        """Return the state with which another run begins from this checkpoint. It keeps what
        belongs to the weights: step, tokens, time, loss scale, and the history of losses and norms.
        It resets what belongs to this run's folder and aims: best loss and patience, checkpoints to
        return to, what was already done at this step."""
        return TrainState(
            step=self.step,
            tokens=self.tokens,
            train_seconds=self.train_seconds,
            loss_scale=self.loss_scale,
            epoch=self.epoch,
            guard=GuardState(self.guard.losses, self.guard.norms),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the state as state.json holds it: every field, and `best`, the best evaluation's
        {step, loss} or None."""
        record = asdict(self)
        record["best"] = (
            None if self.best_step is None else {"step": self.best_step, "loss": self.best_loss}
        )
        return record

    def is_due(self, interval: int | None, last_step: int, n_steps: int) -> bool:
        """Return True if an action is due now that is done every `interval` steps (None: never) and
        after the run's last step, `n_steps`. `last_step` is the step at which it was last done: at
        the same step it is not due again."""
        if interval is None or last_step == self.step:
            return False
        return self.step % interval == 0 or self.step == n_steps

    def record_eval(self, loss: float, *, trained: bool, of: str) -> bool:
        """Record an evaluation's validation loss at this step, and return True if it is the best so
        far of those measured on the same, `of`.

        With `trained` False (no step made, random weights) it is never the best: there is nothing
        worth keeping.
        """
        self.last_eval_step = self.step
        if not trained or not math.isfinite(loss):
            return False
        if self.best_loss is None or of != self.best_of or loss < self.best_loss:
            self.best_of = of
            self.best_step, self.best_loss, self.evals_without_best = self.step, loss, 0
            return True
        self.evals_without_best += 1
        return False


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint's record of its run's logs and data: sizes of the logs in bytes, metrics lines
    that the disk had refused, the sha256 of the tokens read so far (None if not recorded), and
    whether each data set of a mixture is drawn with its own random keys (see `TrainingBatches`)."""

    metrics_bytes: Count = 0
    log_bytes: Count = 0
    metrics_unwritten: tuple[str, ...] = ()
    data_hash: str | None = None
    own_keys: bool = False


Kind = TypeVar("Kind", TrainState, SavedRun)
_LATER = (
    "best_of", "epoch", "guard", "proved_step", "saved_best_step", "metrics_unwritten", "data_hash",
    "own_keys",
)  # fmt: skip
"""Keys that checkpoints by earlier versions lack; their defaults are used then."""


def saved_state(checkpoint: Checkpoint) -> tuple[TrainState, SavedRun]:
    """Read state.json from a run's checkpoint.

    Raises CorruptError, naming the file and the key, if a key is missing, has another type or is
    out of range, or if the step is not the manifest's.
    """
    path = checkpoint.path / STATE_NAME
    state = _read(TrainState, checkpoint.state, path)
    if state.step != checkpoint.step:
        raise CorruptError(
            f"{path} is malformed: step={state.step}, and the manifest beside it says "
            f"{checkpoint.step}"
        )
    return state, _read(SavedRun, checkpoint.state, path)


def _read(kind: type[Kind], record: Mapping[str, Any], path: Path) -> Kind:
    for name in kind.__dataclass_fields__:
        if name not in record and name not in _LATER:
            raise CorruptError(f"{path} is malformed: it has no {name!r}")
    try:  # as JSON, for which strict types allow an object for a dataclass
        return TypeAdapter(kind).validate_json(json.dumps(record), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise CorruptError(
            f"{path} is malformed: {key}={problem['input']!r:.60}: {problem['msg']}"
        ) from error
