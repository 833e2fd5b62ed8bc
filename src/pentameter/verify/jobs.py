"""The messages to and from verify's processes: a job, its numbers or its failure."""

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
    """One rank's job in a case with `world_size` ranks."""

    config: Config
    n_steps: int
    rank: int
    world_size: int
    rendezvous_file: str
    timeout_seconds: float
    prepare: str | None = None
    """`module:function`, called first, without arguments. Tests plant faults with it."""
    model: SentModel | None = None
    """A custom model; None for the built-in GPT."""


@dataclass(frozen=True)
class Failed:
    """A worker's reply to a job that raised."""

    message: str
    """The last line of the traceback."""
    traceback: str
    is_consequence: bool
    """True if it merely says that another worker is gone."""


@dataclass(frozen=True)
class StepNumbers:
    """One rank's results in one step, all tensors gathered to full size.

    A replica of a tied weight has the weight's name.
    """

    loss: float
    gradients: Mapping[str, Float64]
    """The gradients before clipping."""
    gradient_norm: float
    weights: Mapping[str, Float64]
    """The weights after clipping and the optimizer step."""
    evaluation_loss: float
    """The evaluation loss with these weights."""
