"""`ModelSource`: all that the engine asks of a model, and the only door by which one enters it.

The built-in GPT comes through it (`gpt_source.py`), and so does a module of somebody's own
(`own_model.py`). The engine runs what comes: it knows of parameters and of calls, not of layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pentameter.config.schema import Config
from pentameter.data.batches.tree import Tree
from pentameter.planning.outline import ModelOutline
from pentameter.planning.plan import Plan
from pentameter.processes.world import World

Call = Callable[[nn.Module, Tree, Tree | None, Tensor | None], Tensor]
"""`call(slice, x, targets, keys)`: the last slice's summed loss of `targets` (B, T), 0-dim, or its
logits (B, T, V) where there are none; another slice's residual stream. x is the batch's inputs, of
the GPT int64 (B, T), for the first slice, else the stream, or (stream, inputs) for a slice that
`ModelSource.reads_inputs`; `keys` are those of `ModelSource.row_keys`."""


class ModelSource(ABC):
    """A model, as the engine asks for it."""

    draws_from_generator = False
    """Whether a forward pass may draw from PyTorch's generator, which is then seeded for each
    micro-batch; a keyed model never does."""
    may_leave_unused = False
    """Whether a parameter may have no part in a micro-batch's loss."""
    takes_any_batch = False
    """Whether inputs and targets may be any structure of tensors (B, …), not tokens alone."""

    @abstractmethod
    def outline(self, config: Config) -> ModelOutline:
        """The parameters of the model of a resolved configuration, and how it can be divided.

        Raises ConfigError for a model that cannot be.
        """

    @abstractmethod
    def build_slice(self, config: Config, layers: range, dtype: torch.dtype) -> nn.Module:
        """Layers of the model, without memory (on `meta`), their parameters of a dtype."""

    @abstractmethod
    def call(self, model: nn.Module, config: Config, layers: range) -> Call:
        """A function, written in Python, that runs such a slice."""

    @abstractmethod
    def divide(
        self, models: Sequence[nn.Module], plan: Plan, mesh: DeviceMesh | None, world: World
    ) -> None:
        """Cut the slices of this process, in place, over every dimension of the mesh but those of
        the data, where there is one, and adapt them where the plan says so; they have no memory
        yet. Collective over the world."""

    @abstractmethod
    def initialize(self, models: Mapping[int, nn.Module], plan: Plan) -> None:
        """Set every parameter and buffer of this process's part of the slices, by the number of
        their stage, in place, to the initial value of the whole model: the same on every layout."""

    @abstractmethod
    def recomputed_blocks(self, model: nn.Module) -> list[nn.Module]:
        """The modules of a slice whose activations are recomputed, one after another."""

    @abstractmethod
    def gathered_units(self, model: nn.Module) -> list[tuple[nn.Module, bool]]:
        """The modules of a slice whose parameters ZeRO gathers together, in the order in which they
        run, and whether products alone read them, so that they can be rounded before they are sent.
        What is in none of them is gathered with the slice."""

    @abstractmethod
    def row_keys(
        self, plan: Plan, step: int, rows: np.ndarray, attended: np.ndarray
    ) -> Tensor | None:
        """The randomness of a step's rows (B,), numbers in the global batch: (B, …), on the CPU;
        None where nothing is random. `attended` are the rows whose attention is computed here."""

    def reads_inputs(self, model: nn.Module) -> bool:
        """Whether a slice that is not the first takes the batch's inputs beside the stream."""
        return False

    def n_targets(self, targets: Tree) -> int | None:
        """The number of targets (arrays) that count in the loss, where the model has a rule of its
        own; None where they are those that are not -1."""
        return None

    def prepare_compiled(self, model: nn.Module) -> None:
        """Change what suits compiled code in a slice that `torch.compile` is about to take."""
        return
