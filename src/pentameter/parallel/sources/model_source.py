"""`ModelSource`: everything the engine needs from a model, and the only interface through which one
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
from pentameter.parallel.mesh import Mesh
from pentameter.parallel.precision import Arithmetic
from pentameter.planning.adapters import TableOf
from pentameter.planning.outline import ModelOutline
from pentameter.planning.plan import Plan
from pentameter.tree import Tree, leaves, map_leaves

Call = Callable[[nn.Module, Tree, Tree | None, Tensor | None], Tensor]
"""`call(slice, x, targets, keys)`: runs a slice. The last slice returns the summed loss over
`targets` (B, T) in nats, 0-dim, or its logits (B, T, V) without targets; other slices return the
residual stream (B, T, D). x is the batch's inputs (int64 (B, T) for the GPT) in the first slice;
else the stream, or (stream, inputs) if `ModelSlice.reads_inputs`. `keys` come from
`ModelSource.row_keys`."""


@dataclass(frozen=True)
class ModelSlice:
    """The module of one pipeline stage, with the functions that run it and the list of its
    sub-modules whose weights ZeRO gathers one by one."""

    model: nn.Module
    """The slice's module; parameters have the names that they have in the full model."""
    call: Call
    units: Sequence[tuple[nn.Module, bool]] = ()
    """(module, feeds matmuls only) pairs, in execution order: the modules that ZeRO all-gathers as
    units. If only matmuls read a unit's parameters, they can be rounded before they are sent.
    Parameters in no unit are gathered with the slice."""
    reads_inputs: bool = False
    """Whether the slice takes the batch's inputs in addition to the residual stream."""
    row_call: Call | None = None
    """A Call without randomness, whose last slice returns each batch row's summed loss in nats,
    (B,). If None, `call` runs on one row after another."""

    def call_by_row(self, x: Tree, targets: Tree | None) -> Tensor:
        """Return each batch row's summed loss in nats (B,) from the last slice, for x and targets
        (B, …), or the residual stream (B, T, D) from any other. Without randomness."""
        if self.row_call is not None:
            return self.row_call(self.model, x, targets, None)
        results = []
        for row in range(len(leaves(targets)[0])):
            own = itemgetter(slice(row, row + 1))
            loss = self.call(self.model, map_leaves(own, x), map_leaves(own, targets), None)
            results.append(torch.atleast_1d(loss))
        return torch.cat(results)


class ModelSource(ABC):
    """Base class of what builds and initializes the model of a run, one slice for each pipeline
    stage, and derives its random keys. There is one for the built-in GPT and one for custom
    models."""

    draws_from_generator = False
    """Whether a forward pass may draw from PyTorch's generator, which is then seeded for each
    micro-batch. False for a model whose dropout masks are computed from keys."""
    may_leave_unused = False
    """Whether some parameter may take no part in a micro-batch's loss, and so get no gradient."""
    computes_with_dtensors = False
    """Whether modules compute with DTensors, whose backward pass sums replicas' gradients along
    their own mesh; otherwise they compute with local shards, and the engine sums."""
    takes_any_batch = False
    """Whether inputs and targets may be any structure of tensors (B, …), not only tokens."""
    table_of: TableOf | None = None
    """Function that returns the parameters that a run saves, given its configuration; None for a
    custom model, which has to be built to know them."""

    @abstractmethod
    def outline(self, config: Config) -> ModelOutline:
        """Return the model's outline under a resolved configuration: its parameters, and how they
        may be sharded.

        Raises ConfigError for a model that cannot be built or parallelized as configured.
        """

    @abstractmethod
    def stage(self, plan: Plan, number: int, mesh: Mesh, arithmetic: Arithmetic) -> ModelSlice:
        """Build pipeline stage `number` without memory (on `meta`), with the dtypes and matmul in
        `arithmetic`, parallelized over every mesh dimension except the data-parallel ones; with
        adapters and recomputed blocks, if the plan has them. Collective over the world."""

    @abstractmethod
    def build_whole(self, config: Config, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Build the full model on `device`, with parameters in `dtype`, without sharding. Tensors
        in its state_dict may be uninitialized: the caller loads them from a checkpoint. All others
        have their values."""

    @abstractmethod
    def initialize(self, models: Mapping[int, nn.Module], plan: Plan) -> None:
        """Set every parameter and buffer in this rank's slices (stage number → slice), in place, to
        its initial value in the full model: the same under every layout."""

    @abstractmethod
    def row_keys(
        self, plan: Plan, step: int, rows: np.ndarray, attended: np.ndarray
    ) -> Tensor | None:
        """Return the random keys or seeds (B, …) for a step's batch rows, on the CPU; None if
        nothing is random. `rows` (B,) are row numbers in the global batch; `attended` (B,) are
        those of the rows whose attention this rank computes, which differ in tensor mode 3d."""

    def row_length(self, plan: Plan, n_tokens: int) -> int:
        """Return how many tokens of each row are computed for a loss without gradients if only the
        first `n_tokens` matter. By default the whole context; a model that accepts shorter rows may
        return fewer."""
        return plan.config.model.context_length

    def n_targets(self, targets: Tree) -> int | None:
        """Return how many of `targets` (arrays) count in the loss. None if the model has no rule of
        its own: then all except -1 count."""
        return None
