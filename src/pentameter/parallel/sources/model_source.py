"""`ModelSource`: everything the engine needs from a model, and the only interface by which one
enters.

The built-in GPT uses it (`gpt_source.py`), and so does a custom model (`custom_model.py`). The
engine sees parameters and calls, not layers.

Shapes: B batch rows, T tokens, D channels, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor, nn

from pentameter.config.schema import Config
from pentameter.data.batches.tree import Tree, leaves, map_leaves
from pentameter.parallel.mesh import Mesh
from pentameter.parallel.precision import Arithmetic
from pentameter.planning.outline import ModelOutline
from pentameter.planning.plan import Plan

Call = Callable[[nn.Module, Tree, Tree | None, Tensor | None], Tensor]
"""`call(slice, x, targets, keys)`: runs a slice. The last slice returns the summed loss over
`targets` (B, T) in nats, 0-dim, or its logits (B, T, V) without targets; other slices return the
residual stream (B, T, D). x is the batch's inputs (int64 (B, T) for the GPT) in the first slice;
else the stream, or (stream, inputs) if `ModelSlice.reads_inputs`. `keys` come from
`ModelSource.row_keys`."""


@dataclass(frozen=True)
class ModelSlice:
    """One pipeline stage's layers, and how to run them."""

    model: nn.Module
    """Its parameters have the names in the Plan's table."""
    call: Call
    units: Sequence[tuple[nn.Module, bool]] = ()
    """The modules that ZeRO all-gathers as units, in execution order, each with whether only
    matmuls read its parameters, which can then be rounded before they are sent. Parameters in no
    unit are gathered with the slice."""
    reads_inputs: bool = False
    """Whether it takes the batch's inputs in addition to the stream."""
    row_call: Call | None = None
    """A Call without randomness whose last slice gives the summed loss of each batch row in nats,
    (B,). If None, `call` runs on one row after another."""

    def call_by_row(self, x: Tree, targets: Tree | None) -> Tensor:
        """Return the rows' losses (B,) from the last slice, or the residual stream (B, T, D)."""
        if self.row_call is not None:
            return self.row_call(self.model, x, targets, None)
        results = []
        for row in range(len(leaves(targets)[0])):
            own = itemgetter(slice(row, row + 1))
            loss = self.call(self.model, map_leaves(own, x), map_leaves(own, targets), None)
            results.append(torch.atleast_1d(loss))
        return torch.cat(results)


class ModelSource(ABC):
    """A model, as the engine uses it."""

    draws_from_generator = False
    """Whether a forward pass may draw from PyTorch's generator, which is then seeded for each
    micro-batch; a model with keyed randomness never does."""
    may_leave_unused = False
    """Whether a parameter may take no part in a micro-batch's loss."""
    computes_with_dtensors = False
    """Whether modules compute with DTensors, whose backward pass sums copies' gradients along their
    own mesh; otherwise they compute with local shards, and the engine sums."""
    takes_any_batch = False
    """Whether inputs and targets may be any structure of tensors (B, …), not only tokens."""

    @abstractmethod
    def outline(self, config: Config) -> ModelOutline:
        """Return the model's parameters under a resolved configuration, and how it can be
        parallelized.

        Raises ConfigError for a model that cannot be built or parallelized as configured.
        """

    @abstractmethod
    def stage(self, plan: Plan, number: int, mesh: Mesh, arithmetic: Arithmetic) -> ModelSlice:
        """Build pipeline stage `number` without memory (on `meta`), with parameters and matmuls as
        in `arithmetic`, parallelized over every mesh dimension except the data-parallel ones, with
        adapters and with blocks whose activations are recomputed, if the plan has them. Collective
        over the world."""

    @abstractmethod
    def build_whole(self, config: Config, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Build the full module on `device`, with parameters in `dtype`. What a state_dict holds
        need not have been initialized, the rest has."""

    @abstractmethod
    def initialize(self, models: Mapping[int, nn.Module], plan: Plan) -> None:
        """Set every parameter and buffer in this rank's slices (stage number → slice), in place, to
        its initial value in the full model: the same under every layout."""

    @abstractmethod
    def row_keys(
        self, plan: Plan, step: int, rows: np.ndarray, attended: np.ndarray
    ) -> Tensor | None:
        """Return the randomness (B, …) for a step's rows, on the CPU; None if nothing is random.
        `rows` (B,) are numbers in the global batch; `attended` (B,) are the rows whose attention
        this rank computes."""

    def row_length(self, plan: Plan, n_tokens: int) -> int:
        """Return how many tokens of a row are computed for a loss without gradients if only the
        first `n_tokens` matter; here the whole context."""
        return plan.config.model.context_length

    def n_targets(self, targets: Tree) -> int | None:
        """Return the number of targets (arrays) that count in the loss, if the model has its own
        rule; None if they are all except -1."""
        return None
