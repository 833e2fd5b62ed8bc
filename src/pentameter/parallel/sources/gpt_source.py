"""The built-in GPT as a ModelSource: sliced by layers, sharded by the plan's placements, with
random values keyed by the seed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pentameter.config.schema import Config
from pentameter.model.attention.attention import Sinks, attend_by
from pentameter.model.dropout import attention_weights_site, dropout_keys
from pentameter.model.experts import Experts, Router
from pentameter.model.gpt import GPT, Block
from pentameter.parallel.context.context_parallel import own_positions
from pentameter.parallel.context.run_attention import run_attention
from pentameter.parallel.experts.balance import count_whole_sequences
from pentameter.parallel.experts.expert_parallel import parallelize_experts
from pentameter.parallel.grid.tensor_grid import Grid
from pentameter.parallel.linear import Forward, install_forwards
from pentameter.parallel.memory.recomputation import recomputed
from pentameter.parallel.mesh import Mesh
from pentameter.parallel.precision import Arithmetic
from pentameter.parallel.sources.adapters import add_adapters
from pentameter.parallel.sources.initial_values import fill_shard
from pentameter.parallel.sources.model_source import ModelSlice, ModelSource
from pentameter.parallel.tensor.tensor_context import TensorContext
from pentameter.parallel.tensor.tensor_parallel import TensorParallelContext
from pentameter.planning.adapters import training_table
from pentameter.planning.layouts.sharding import Placement
from pentameter.planning.outline import ModelOutline, outline_of_gpt
from pentameter.planning.plan import Plan


class GPTSource(ModelSource):
    """Builds the built-in GPT, or a slice of it, as the configuration's `[model]` section describes
    it, and sets its initial values."""

    table_of = staticmethod(training_table)

    def outline(self, config: Config) -> ModelOutline:
        """Return the GPT's outline (parameters, and how they may be sharded), computed without
        building it."""
        return outline_of_gpt(config)

    def stage(self, plan: Plan, number: int, mesh: Mesh, arithmetic: Arithmetic) -> ModelSlice:
        """Build pipeline stage `number` on `meta`, its matrices sharded over `tensor`, in one
        dimension or several, and sequences over `context`, and return it with its call and its
        units. Adapters, if configured, are sharded with the matrices they adapt."""
        layers, layout, sharding = plan.stages[number], plan.layout, plan.sharding
        with torch.device("meta"):
            model = GPT(plan.config.model, first_layer=layers.start, last_layer=layers.stop)
            model.to(arithmetic.weights)
        install_forwards(model.blocks, arithmetic.in_blocks, {})
        model.stream_dtype = arithmetic.stream
        forwards: dict[nn.Module, Forward] = {}
        if layout.shards_experts:
            # The time of DTensor's first operations is exponential in a mesh's dimensions.
            over = [name for name in ("expert", "expert_tensor") if layout.expert_sizes[name] > 1]
            _shard_parameters(model, mesh.along(*over), plan.placements)
            forwards |= parallelize_experts(model, mesh, arithmetic.matmul)
        if layout.tensor > 1 and mesh.parameters is not None:
            dimensions = ("row", "tensor") if layout.is_grid else ("tensor",)
            _shard_parameters(model, mesh.parameters[dimensions], plan.placements)
            context: TensorContext
            if layout.is_grid:
                context = Grid(sharding, arithmetic, mesh)
            else:
                at_once = plan.rules.reads_at_once(plan.config.lora)
                context = TensorParallelContext(sharding, arithmetic, mesh, reads_at_once=at_once)
            forwards |= context.forwards(model)
        add_adapters(model, plan.adapted_modules, plan.config.lora)
        forwards |= recomputed(model.blocks.values(), plan.config.train.activation_checkpoint)
        install_forwards(model, arithmetic.matmul, forwards)
        T, forms = plan.config.model.context_length, arithmetic.forms
        ring_dtype = arithmetic.products if forms.fused_ring else None
        attention = run_attention(
            layout, T, mesh, in_kernels=forms.drops_by_blocks, ring_dtype=ring_dtype
        )
        attend_by(model, attention)
        model.text_length = T
        forms.install(model)
        if layout.context > 1:
            model.attention_positions = partial(own_positions, layout, mesh.coordinates["context"])
        sharing = ["context"] * (layout.context > 1) + ["tensor"] * layout.sequence
        count_whole_sequences(model, [mesh.groups[each] for each in sharing])
        return gpt_slice(model)

    def build_whole(self, config: Config, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Build all GPT layers on `device` in `dtype`, uninitialized: the caller loads the
        weights."""
        with torch.device("meta"):
            model = GPT(config.model).to(dtype)
        return model.to_empty(device=device)

    def initialize(self, models: Mapping[int, nn.Module], plan: Plan) -> None:
        """Draw every parameter from the seed, its name and its element indices, in place. A rank
        draws the values in its own shards and no others. `models` maps stage number → slice."""
        specs = {spec.name: spec for spec in plan.table}
        for model in models.values():
            for name, parameter in model.named_parameters():
                fill_shard(specs[name], parameter, plan.config.seed)

    def row_length(self, plan: Plan, n_tokens: int) -> int:
        """Return how many tokens of each row are computed if only the first `n_tokens` matter:
        `n_tokens`, or the context length with `context`, `sequence` or `pipeline` parallelism,
        whose messages have fixed shapes."""
        layout = plan.layout
        is_fixed = layout.context > 1 or layout.sequence or layout.pipeline > 1
        return plan.config.model.context_length if is_fixed else n_tokens

    def row_keys(
        self, plan: Plan, step: int, rows: np.ndarray, attended: np.ndarray
    ) -> Tensor | None:
        """Return the keys from which one step's dropout masks are computed: two random words for
        each batch row and dropout site (see `dropout_keys`), int32 (B, n_sites, 2) on the CPU; None
        for a model without dropout.

        `rows` (B,) are the batch rows' numbers in the global batch. In tensor mode 3d this rank
        computes attention for other rows, `attended` (B,), and the sites on attention weights get
        those rows' keys. In other modes `attended` is not read.
        """
        model, seed = plan.config.model, plan.config.seed
        if not (model.dropout or model.attention.dropout or model.embedding_dropout):
            return None
        keys = dropout_keys(model, seed, step, rows)
        if plan.layout.is_3d:  # attention runs on other rows
            sites = [attention_weights_site(layer) for layer in range(model.n_layers)]
            keys[:, sites] = dropout_keys(model, seed, step, attended)[:, sites]
        return keys


def gpt_slice(model: GPT) -> ModelSlice:
    """Return the ModelSlice for a GPT, or for a slice of one. Its units, which ZeRO all-gathers,
    are the sub-layers, whose parameters only matmuls read. Norms, sinks and routers inside a
    sub-layer are not read by matmuls alone, and are units of their own, listed before it. So are
    the shared experts and their gate: the routed experts beside them may lie on another mesh."""
    units: list[tuple[nn.Module, bool]] = []
    for block in model.blocks.values():
        assert isinstance(block, Block)
        for _, sub_layer in block.sub_layers():
            precise = (m for m in sub_layer.modules() if isinstance(m, nn.RMSNorm | Router | Sinks))
            units += [(module, False) for module in precise]
            if isinstance(sub_layer, Experts):
                beside = (sub_layer.shared, sub_layer.shared_gate)
                units += [(module, True) for module in beside if module is not None]
            units.append((sub_layer, True))
    return ModelSlice(model, call_gpt, units, row_call=call_gpt_by_row)


def call_gpt(model: nn.Module, x: Tensor, targets: Tensor | None, keys: Tensor | None) -> Tensor:
    """Run a GPT slice. x is int64 (B, T) or the residual stream (B, T, D), targets (B, T), dropout
    `keys` (B, n_sites, 2) or None. The last slice returns the summed loss in nats, 0-dim, or logits
    (B, T, V) without targets; others return (B, T, D)."""
    y: Tensor = model(x, targets=targets, dropout_keys=keys)
    return y


def call_gpt_by_row(
    model: nn.Module, x: Tensor, targets: Tensor | None, keys: Tensor | None
) -> Tensor:
    """Run a GPT slice without dropout on x, int64 (B, T) or the residual stream (B, T, D). The last
    slice returns each batch row's summed loss, (B,), against targets (B, T); others return the
    residual stream (B, T, D). `keys` are not read.

    All rows run through the layers at once. Only the head's loss, which any layout computes as one
    sum, takes them one by one.
    """
    assert isinstance(model, GPT)
    hidden = model.hidden_states(x)
    if not model.is_last:
        return hidden
    assert targets is not None
    weight, bias = model.head_parameters()
    rows = zip(hidden.split(1), targets.split(1), strict=True)
    return torch.stack([model.head_loss(row, weight, bias, target) for row, target in rows])


def _shard_parameters(
    model: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]
) -> None:
    """Replace each parameter that a dimension of `mesh` shards by a DTensor, in place; `placements`
    maps parameter names to their placements. The others stay plain tensors, replicated on every
    rank.

    Nothing is sent: parameters are on `meta`, to be initialized or loaded afterwards.
    """
    assert mesh.mesh_dim_names is not None  # every mesh here has dimension names
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = placements[f"{path}.{name}".removeprefix(".")]
            sharded = [placement.dimension(each) for each in mesh.mesh_dim_names]
            if all(dimension is None for dimension in sharded):
                continue
            dtensor_placements = [Replicate() if each is None else Shard(each) for each in sharded]
            shards = distribute_tensor(parameter, mesh, dtensor_placements, src_data_rank=None)
            sharded_parameter = nn.Parameter(shards, requires_grad=parameter.requires_grad)
            module.register_parameter(name, sharded_parameter)
