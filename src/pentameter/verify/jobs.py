"""The records that verify sends to its worker processes and gets back: a job, then its
numbers or its failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pentameter.config.schema import Config
from pentameter.verify.sent_model import SentModel

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """One rank's work in one case: `n_steps` steps with `config`, together with the `world_size`
    ranks that meet at `rendezvous_file`."""

    config: Config
    n_steps: int
    rank: int
    world_size: int
    rendezvous_file: str
    timeout_seconds: float
    prepare: str | None = None
    """`module:function`, called first, without arguments; None for nothing. Tests plant faults with
    it."""
    model: SentModel | None = None
    """A custom model; None for the built-in GPT."""
    small_blocks: bool = False
    """Whether what is computed in blocks (a ring's tiles, chunks of the loss) has some so small
    that there are several at verify's sizes; otherwise each is one block, as in small runs."""

    @property
    def shards_experts(self) -> bool:
        """Whether ranks hold different experts, or different shards of them."""
        parallel = self.config.parallel
        return parallel.expert * parallel.expert_tensor > 1


@dataclass(frozen=True)
class Failed:
    """A worker's reply to a job that raised an exception."""

    message: str
    """The exception's type and text: the last line of the traceback."""
    traceback: str
    is_consequence: bool
    """True if it merely says that another worker is gone, whose failure is the cause."""


@dataclass(frozen=True)
class StepNumbers:
    """One rank's results in one step; each tensor is the full one, gathered over ranks, by
    parameter name.

    A replica of a tied weight has the weight's name.
    """

    loss: float
    gradients: Mapping[str, Float64]
    """Gradients before clipping."""
    gradient_norm: float
    weights: Mapping[str, Float64]
    """Weights after clipping and the optimizer step."""
    evaluation_loss: float
    """Loss of an evaluation with these weights."""
    row_losses: Float64 | None = None
    """Each row's loss in an evaluation (B,), as choices are scored, after the last step; None after
    others, and of a custom model."""
    next_logits: Float64 | None = None
    """Logits after a text (1, V), as a run samples, after the last step; None after others, and of
    a custom model."""
