"""Records that verify sends to its worker processes, and gets back from them: a job, then its
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
    """The task of one worker process of `verify`: compute `n_steps` steps with `config`, as one
    rank of a case. The `world_size` ranks of the case meet through `rendezvous_file`."""

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
    """True to lower block sizes (a ring's tiles, chunks of the loss) so far that even verify's
    small tensors consist of several blocks. Otherwise each is one block."""

    @property
    def shards_experts(self) -> bool:
        """True if ranks hold different experts, or different shards of them."""
        parallel = self.config.parallel
        return parallel.expert * parallel.expert_tensor > 1


@dataclass(frozen=True)
class Failed:
    """The message that a worker sends in place of its results if its job raised an exception."""

    message: str
    """The exception's type and text: the last line of the traceback."""
    traceback: str
    is_consequence: bool
    """True if the exception only says that another worker is gone, whose failure is the cause."""


@dataclass(frozen=True)
class StepNumbers:
    """One rank's results in one step. Each tensor is whole, gathered over ranks, and listed by
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
    """Loss (B,) of each batch row in an evaluation after the last step, as multiple choice computes
    them. None after other steps, and for a custom model."""
    next_logits: Float64 | None = None
    """Logits (1, V) for the token after a text, as sampling during training computes them, after
    the last step. None after other steps, and for a custom model."""
