"""The built-in GPT, as the engine asks for it: sliced by layers, cut by tables, keyed by a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pentameter.config.schema import Config
from pentameter.model.dropout import attention_weights_site, dropout_keys
from pentameter.model.gpt import GPT
from pentameter.model.loss import compiled_row_loss
from pentameter.parallel.adapters import add_adapters
from pentameter.parallel.context_parallel import share_context
from pentameter.parallel.initial_values import fill_part
from pentameter.parallel.mesh import group_along
from pentameter.parallel.model_source import Call, ModelSource
from pentameter.parallel.tensor_grid import Grid, share_grid
from pentameter.parallel.tensor_parallel import share_matrices
from pentameter.planning.adapters import adapted_modules
from pentameter.planning.outline import ModelOutline, outline_of_gpt
from pentameter.planning.plan import Plan
from pentameter.processes.world import World


class GPTSource(ModelSource):
    """The model of the configuration's `[model]` section."""

    def outline(self, config: Config) -> ModelOutline:
        """The table of `planning/architecture.py`."""
        return outline_of_gpt(config)

    def build_slice(self, config: Config, layers: range, dtype: torch.dtype) -> GPT:
        """Layers of the GPT, on `meta`."""
        with torch.device("meta"):
            model = GPT(config.model, first_layer=layers.start, last_layer=layers.stop)
            return model.to(dtype)

    def call(self, model: nn.Module, config: Config, layers: range) -> Call:
        """A call of `GPT.forward`."""
        return call_gpt

    def divide(
        self, models: Sequence[nn.Module], plan: Plan, mesh: DeviceMesh | None, world: World
    ) -> None:
        """Cut matrices by `tensor`, in one dimension or several, and time by `context`; adapters
        are cut with the matrices that they adapt."""
        layout = plan.layout
        divides_time = group_along("context", layout, world) if layout.context > 1 else None
        grid = Grid.of(layout, world) if layout.tensor_mode != "1d" else None
        for model in map(_gpt, models):
            if mesh is not None and grid is not None:
                share_grid(model, mesh["row", "tensor"], grid)
            elif mesh is not None and layout.tensor > 1:
                share_matrices(model, mesh["tensor"], plan)
            if plan.config.lora.rank is not None:
                paths = adapted_modules(plan.config.model, plan.config.lora)
                add_adapters(model, paths, plan)
            if divides_time is not None:
                share_context(model, divides_time, layout)

    def initialize(self, models: Mapping[int, nn.Module], plan: Plan) -> None:
        """Draw every parameter from the seed, its name and its elements' numbers. A rank draws the
        values of its own shards and no others."""
        specs = {spec.name: spec for spec in plan.table}
        for model in models.values():
            for name, parameter in model.named_parameters():
                fill_part(specs[name], parameter, plan.config.seed)

    def recomputed_blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks."""
        return list(_gpt(model).blocks.values())

    def gathered_units(self, model: nn.Module) -> list[tuple[nn.Module, bool]]:
        """Attention and feed-forward of each block, whose parameters products alone read, and
        before them the norms within attention."""
        units: list[tuple[nn.Module, bool]] = []
        for block in self.recomputed_blocks(model):
            attention = block.get_submodule("attention")
            norms = (each for each in attention.children() if isinstance(each, nn.RMSNorm))
            units += [(norm, False) for norm in norms]
            units += [(attention, True), (block.get_submodule("mlp"), True)]
        return units

    def row_keys(
        self, plan: Plan, step: int, rows: np.ndarray, attended: np.ndarray
    ) -> Tensor | None:
        """The keys of every site of dropout; None without dropout."""
        model, seed = plan.config.model, plan.config.seed
        if not (model.dropout or model.attention_dropout or model.embedding_dropout):
            return None
        keys = dropout_keys(model, seed, step, rows)
        if plan.layout.tensor_mode == "3d":  # attention is computed of other rows
            sites = [attention_weights_site(layer) for layer in range(model.n_layers)]
            keys[:, sites] = dropout_keys(model, seed, step, attended)[:, sites]
        return keys

    def prepare_compiled(self, model: nn.Module) -> None:
        """Have chunks of the loss computed by a kernel that is compiled by itself."""
        if _gpt(model).is_last:
            _gpt(model).head_loss.row_loss = compiled_row_loss


def call_gpt(model: nn.Module, x: Tensor, targets: Tensor | None, keys: Tensor | None) -> Tensor:
    """What a slice of the GPT returns."""
    y: Tensor = model(x, targets=targets, dropout_keys=keys)
    return y


def _gpt(model: nn.Module) -> GPT:
    assert isinstance(model, GPT)
    return model
