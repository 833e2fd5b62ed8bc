"""`ModelSource`: everything the engine needs from a model, and the only interface by which one
enters.

The built-in GPT uses it (`gpt_source.py`), and so does a custom model (`custom_model.py`). The
engine sees parameters and calls, not layers.

Shapes: B batch rows, T tokens, D channels, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pentameter.config.schema import Config
from pentameter.data.batches.tree import Tree, leaves, map_leaves
from pentameter.parallel.precision import Arithmetic
from pentameter.planning.outline import ModelOutline
from pentameter.planning.plan import Plan
from pentameter.processes.world import World

Call = Callable[[nn.Module, Tree, Tree | None, Tensor | None], Tensor]
"""`call(slice, x, targets, keys)`: runs a slice. The last slice returns the summed loss over
`targets` (B, T) in nats, 0-dim, or its logits (B, T, V) without targets; other slices return the
residual stream (B, T, D). x is the batch's inputs (int64 (B, T) for the GPT) in the first slice;
else the stream, or (stream, inputs) if `ModelSource.reads_inputs`. `keys` come from
`ModelSource.row_keys`."""


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
    def build_slice(self, config: Config, layers: range, dtype: torch.dtype) -> nn.Module:
        """Build a range of layers without memory (on `meta`), with parameters in `dtype`."""

    @abstractmethod
    def call(self, model: nn.Module, config: Config, layers: range) -> Call:
        """Return a Python function that runs such a slice."""

    def row_call(self, model: nn.Module, config: Config, layers: range) -> Call:
        """Return a Call without randomness whose last slice gives the summed loss of each batch row
        in nats, (B,). Here, a module that only knows the sum runs on one row after another."""
        call = self.call(model, config, layers)

        def call_each_row(
            model: nn.Module, x: Tree, targets: Tree | None, keys: Tensor | None
        ) -> Tensor:
            """Return the rows' losses (B,), or the residual stream (B, T, D)."""
            results = []
            for row in range(len(leaves(targets)[0])):
                own, target = (
                    map_leaves(itemgetter(slice(row, row + 1)), each) for each in (x, targets)
                )
                results.append(torch.atleast_1d(call(model, own, target, None)))
            return torch.cat(results)

        return call_each_row

    @abstractmethod
    def divide(
        self,
        models: Sequence[nn.Module],
        plan: Plan,
        arithmetic: Arithmetic,
        mesh: DeviceMesh | None,
        world: World,
    ) -> None:
        """Parallelize this rank's slices, in place, over every mesh dimension except the
        data-parallel ones, if there is a mesh; and attach adapters if the plan has them. The slices
        have no memory yet, and multiply as `arithmetic` does. Collective over the world."""

    @abstractmethod
    def initialize(self, models: Mapping[int, nn.Module], plan: Plan) -> None:
        """Set every parameter and buffer in this rank's slices (stage number → slice), in place, to
        its initial value in the full model: the same under every layout."""

    @abstractmethod
    def recomputed_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules in a slice whose activations are recomputed, one after another."""

    @abstractmethod
    def gathered_units(self, model: nn.Module) -> list[tuple[nn.Module, bool]]:
        """Return the modules in a slice that ZeRO all-gathers as units, in execution order, each
        with whether only matmuls read its parameters, which can then be rounded before they are
        sent. Parameters in no unit are gathered with the slice."""

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

    def reads_inputs(self, model: nn.Module) -> bool:
        """Return whether a slice other than the first takes the batch's inputs in addition to the
        stream."""
        return False

    def n_targets(self, targets: Tree) -> int | None:
        """Return the number of targets (arrays) that count in the loss, if the model has its own
        rule; None if they are all except -1."""
        return None

    def prepare_compiled(self, model: nn.Module) -> None:
        """Adapt a slice for `torch.compile`, before it is compiled."""
        return
