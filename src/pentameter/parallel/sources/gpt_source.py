"""The built-in GPT as a ModelSource: sliced by layers, sharded by tables, keyed by a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pentameter.config.schema import Config
from pentameter.model.dropout import attention_weights_site, dropout_keys
from pentameter.model.experts import Router
from pentameter.model.gpt import GPT, Block
from pentameter.model.loss import compiled_row_loss
from pentameter.parallel.balance import count_whole_sequences
from pentameter.parallel.context.context_parallel import parallelize_context
from pentameter.parallel.grid.tensor_grid import Grid, parallelize_grid
from pentameter.parallel.mesh import group_along, shard_parameters
from pentameter.parallel.precision import Arithmetic
from pentameter.parallel.sources.adapters import add_adapters
from pentameter.parallel.sources.initial_values import fill_shard
from pentameter.parallel.sources.model_source import Call, ModelSource
from pentameter.parallel.tensor.tensor_parallel import parallelize_tensor
from pentameter.planning.outline import ModelOutline, outline_of_gpt
from pentameter.planning.plan import Plan
from pentameter.processes.world import World


class GPTSource(ModelSource):
    """The model in the configuration's `[model]` section."""

    def outline(self, config: Config) -> ModelOutline:
        """Return the outline from the parameter table in `planning/gpt.py`."""
        return outline_of_gpt(config)

    def build_slice(self, config: Config, layers: range, dtype: torch.dtype) -> GPT:
        """Build a range of GPT layers on `meta`."""
        with torch.device("meta"):
            model = GPT(config.model, first_layer=layers.start, last_layer=layers.stop)
            return model.to(dtype)

    def call(self, model: nn.Module, config: Config, layers: range) -> Call:
        """Return `call_gpt`, which runs `GPT.forward`."""
        return call_gpt

    def divide(
        self,
        models: Sequence[nn.Module],
        plan: Plan,
        arithmetic: Arithmetic,
        mesh: DeviceMesh | None,
        world: World,
    ) -> None:
        """Shard matrices over `tensor`, in one dimension or several, and sequences over `context`;
        adapters are sharded with the matrices they adapt."""
        layout = plan.layout
        context_group = group_along("context", layout, world) if layout.context > 1 else None
        grid = Grid.of(plan.sharding, arithmetic, world) if layout.is_grid else None
        for model in map(_gpt, models):
            if plan.config.lora.rank is not None:
                add_adapters(model, plan, arithmetic.matmul)
            if mesh is not None and layout.tensor > 1:
                over = mesh["row", "tensor"] if layout.is_grid else mesh["tensor"]
                shard_parameters(model, over, plan.placements)
                if grid is not None:
                    parallelize_grid(model, grid)
                else:
                    parallelize_tensor(model, over, plan, arithmetic)
            if context_group is not None:
                parallelize_context(model, context_group, plan.sharding)
            sharing = [] if context_group is None else [context_group]
            if mesh is not None and layout.sequence:
                sharing.append(mesh["tensor"].get_group())
            count_whole_sequences(model, sharing)

    def initialize(self, models: Mapping[int, nn.Module], plan: Plan) -> None:
        """Draw every parameter from the seed, its name and its element indices. A rank draws the
        values in its own shards and no others."""
        specs = {spec.name: spec for spec in plan.table}
        for model in models.values():
            for name, parameter in model.named_parameters():
                fill_shard(specs[name], parameter, plan.config.seed)

    def recomputed_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the transformer blocks."""
        return list(_gpt(model).blocks.values())

    def gathered_units(self, model: nn.Module) -> list[tuple[nn.Module, bool]]:
        """Return each block's sub-layers, whose parameters only matmuls read, each preceded by the
        norms and the router within it."""
        units: list[tuple[nn.Module, bool]] = []
        for block in _gpt(model).blocks.values():
            assert isinstance(block, Block)
            for _, sub_layer in block.sub_layers():
                precise = (m for m in sub_layer.modules() if isinstance(m, nn.RMSNorm | Router))
                units += [*((module, False) for module in precise), (sub_layer, True)]
        return units

    def row_keys(
        self, plan: Plan, step: int, rows: np.ndarray, attended: np.ndarray
    ) -> Tensor | None:
        """Return the dropout keys (B, …) for every dropout site; None without dropout."""
        model, seed = plan.config.model, plan.config.seed
        if not (model.dropout or model.attention_dropout or model.embedding_dropout):
            return None
        keys = dropout_keys(model, seed, step, rows)
        if plan.layout.is_3d:  # attention runs on other rows
            sites = [attention_weights_site(layer) for layer in range(model.n_layers)]
            keys[:, sites] = dropout_keys(model, seed, step, attended)[:, sites]
        return keys

    def prepare_compiled(self, model: nn.Module) -> None:
        """Have the loss's chunks computed by a kernel that is compiled on its own."""
        if _gpt(model).is_last:
            _gpt(model).head_loss.row_loss = compiled_row_loss


def call_gpt(model: nn.Module, x: Tensor, targets: Tensor | None, keys: Tensor | None) -> Tensor:
    """Run a GPT slice. x is int64 (B, T) or the residual stream (B, T, D), targets (B, T). Returns
    the summed loss, 0-dim, or logits (B, T, V) without targets, from the last slice; (B, T, D) from
    others."""
    y: Tensor = model(x, targets=targets, dropout_keys=keys)
    return y


def _gpt(model: nn.Module) -> GPT:
    assert isinstance(model, GPT)
    return model
