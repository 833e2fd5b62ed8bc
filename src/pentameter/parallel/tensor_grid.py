"""Tensor parallelism of two, two and a half and three dimensions: what each module computes there.

Weights and activations are divided: rows of the batch, channels of the residual stream, heads,
the feed-forward layer's width, the vocabulary. A process computes attention and activation
functions of its own rows, heads and channels alone; products (`summa.py`, `product_3d.py`), norms,
the embedding and the loss reach the others. What becomes of which module is one literal table; the
model's code stays as it is.

Shapes: B rows that are here, T time, D channels and V tokens of all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from pentameter.model.dropout import AttentionDropout, StreamDropout
from pentameter.model.gpt import GPT
from pentameter.model.loss import HeadLoss
from pentameter.parallel.divided_norm import divided_norm
from pentameter.parallel.mesh import group_along, name_of
from pentameter.parallel.parts import gather_parts, gathered_columns, reduce_parts, sum_parts
from pentameter.parallel.precision import product_dtype
from pentameter.parallel.product_3d import Product3d
from pentameter.parallel.summa import Summa
from pentameter.parallel.tensor_parallel import divide_modules, run_instead
from pentameter.planning.architecture import parameter_table
from pentameter.planning.layout import PARAMETER_DIMENSIONS, Layout, part_size
from pentameter.processes.world import World

Style = Callable[["Grid", Any], None]
"""Divides a module's work, in place."""


@dataclass(frozen=True)
class Grid:
    """A process's place among those that share a model's matrices, and its groups, by name."""

    layout: Layout
    places: Mapping[str, int]
    depth: str
    row: str
    tensor: str

    @staticmethod
    def of(layout: Layout, world: World) -> Grid:
        """The Grid of a process of `layout`. Collective over the world."""
        names = {
            dimension: name_of(group_along(dimension, layout, world))
            for dimension in ("depth", "row", "tensor")
            if layout.sizes[dimension] > 1
        }
        return Grid(
            layout,
            layout.coordinates(world.rank),
            names.get("depth", ""),
            **{dimension: names[dimension] for dimension in ("row", "tensor")},
        )

    @property
    def is_3d(self) -> bool:
        """Whether the three dimensions change their parts from product to product."""
        return self.layout.tensor_mode == "3d"

    @property
    def heads(self) -> tuple[str, str]:
        """The dimension that divides heads, the feed-forward width and the vocabulary between two
        products, and its group."""
        return ("depth", self.depth) if self.is_3d else ("tensor", self.tensor)

    def width(self, n: int, *, largest: bool = False) -> int:
        """Of n channels or tokens, as `heads` divides them, those that are here."""
        return self.layout.local_shape((n,), ("vocab",), {} if largest else self.places)[0]

    def part(self, n: int) -> int:
        """The largest part of an axis of a parameter that `row` divides."""
        return part_size(n, self.layout.parameter_sizes["row"], 0)

    def reading(self, weight: Tensor) -> Summa | Product3d:
        """The product of the stream with a matrix (N, D)."""
        n_out = weight.shape[0]
        if not self.is_3d:
            return Summa(n_out, self.row, self.tensor)
        return Product3d(self.width(n_out), self.part(n_out), 0, self.depth, self.row, self.tensor)

    def adding(self, weight: Tensor) -> Summa | Product3d:
        """The product with a matrix (D, K) that is added to the stream."""
        n_out, n_in = weight.shape
        if not self.is_3d:
            return Summa(n_out, self.row, self.tensor)
        return Product3d(self.width(n_in), self.part(n_in), 1, self.tensor, self.row, self.depth)

    def vector(self, vector: Tensor | None) -> Tensor | None:
        """Of a bias of what `reading` makes, the numbers of what is here."""
        if vector is None:
            return None
        own, n = _local(vector), len(vector)
        return gather_parts(own, self.part(n), self.width(n), self.row) if self.is_3d else own


def grid_table() -> dict[str, Style]:
    """Module path → how its work is divided."""
    return {
        "token_embedding": _divide_look_up,
        "position_embedding": _divide_positions,
        "blocks.*.attention_norm": _divide_norm,
        "blocks.*.attention.qkv": _divide_reading,  # by head
        "blocks.*.attention.q": _divide_reading,
        "blocks.*.attention.kv": _divide_reading,
        "blocks.*.attention.?_norm": _divide_norm_of_heads,
        "blocks.*.attention.out": _divide_adding,
        "blocks.*.mlp_norm": _divide_norm,
        "blocks.*.mlp.gate": _divide_reading,
        "blocks.*.mlp.up": _divide_reading,
        "blocks.*.mlp.down": _divide_adding,
        "final_norm": _divide_norm,
        "head": _divide_logits,
        "head_loss": _divide_loss,
    }


def share_grid(model: GPT, mesh: DeviceMesh, grid: Grid) -> None:
    """Cut the model over `mesh`, whose dimensions are `row` and `tensor`, in place.

    Nothing is sent: parameters are meant to be initialised or loaded afterwards. Those that several
    processes hold alike get the gradient of each one's tokens, to be added up.
    """
    _place_parameters(model, mesh, grid.layout)
    divide_modules(model, grid_table(), grid)
    D, place = model.config.d_model, grid.places["tensor"]
    (width,) = grid.layout.local_shape((D,), ("embed",))
    model.stream_channels = slice(place * width, (place + 1) * width)
    for module in model.modules():
        if isinstance(module, StreamDropout):
            module.d_model, module.first_channel = D, place * width
        if isinstance(module, AttentionDropout):
            n_heads = grid.layout.n_heads_here(model.config.n_heads)
            module.head_offset = grid.places[grid.heads[0]] * n_heads


def _place_parameters(model: GPT, mesh: DeviceMesh, layout: Layout) -> None:
    """Make DTensors of all parameters, each divided as the layout says."""
    divisions = {
        spec.name: layout.parameter_divisions(spec.axes) for spec in parameter_table(model.config)
    }
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            divided = divisions[f"{path}.{name}"]
            placements: list[Placement] = [
                Shard(divided.index(dimension)) if dimension in divided else Replicate()
                for dimension in PARAMETER_DIMENSIONS[-2:]
            ]
            part = distribute_tensor(parameter, mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part))


def _local(parameter: Tensor) -> Tensor:
    """This process's part of a parameter, whose gradient is its own as well."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# -- products -----------------------------------------------------------------------------------


def _divide_reading(grid: Grid, module: nn.Linear) -> None:
    product = grid.reading(module.weight)

    def forward(x: Tensor) -> Tensor:
        y = product(x.to(product_dtype(x)), _local(module.weight))
        bias = grid.vector(module.bias)
        return y if bias is None else y + bias.to(y.dtype)

    run_instead(module, forward)


def _divide_adding(grid: Grid, module: nn.Linear) -> None:
    product = grid.adding(module.weight)

    def forward(x: Tensor) -> Tensor:
        y = product(x.to(product_dtype(x)), _local(module.weight))
        return y if module.bias is None else y + _local(module.bias).to(y.dtype)

    run_instead(module, forward)


# -- norms and embeddings -----------------------------------------------------------------------


def _divide_norm(grid: Grid, module: nn.LayerNorm | nn.RMSNorm) -> None:
    centred, eps = isinstance(module, nn.LayerNorm), module.eps
    assert eps is not None

    def forward(x: Tensor) -> Tensor:
        bias = getattr(module, "bias", None)
        own_bias = None if bias is None else _local(bias)
        y, _ = divided_norm(x, _local(module.weight), own_bias, eps, centred, grid.tensor)
        return y

    run_instead(module, forward)


def _divide_norm_of_heads(grid: Grid, module: nn.RMSNorm) -> None:
    """Of each head's channels a process has all or none, of all heads' together its own heads'."""
    eps = module.eps
    assert eps is not None
    of_all = isinstance(module.weight, DTensor) and not all(
        placement.is_replicate() for placement in module.weight.placements
    )

    def forward(x: Tensor) -> Tensor:
        if not of_all:
            return F.rms_norm(x, x.shape[-1:], _local(module.weight), eps)
        weight = grid.vector(module.weight)
        assert weight is not None
        y, _ = divided_norm(x, weight, None, eps, False, grid.heads[1])
        return y

    run_instead(module, forward)


def _divide_look_up(grid: Grid, module: nn.Embedding) -> None:
    """Each process looks up all tokens of a group in its own part of the vocabulary, and has the
    sums for its own: tokens travel, and not the vocabulary."""
    V = module.num_embeddings
    dimension, group_name = ("depth", grid.depth) if grid.is_3d else ("row", grid.row)
    first = grid.places[dimension] * grid.width(V, largest=True)
    size = grid.layout.sizes[dimension]

    def forward(tokens: Tensor) -> Tensor:
        weight, B = _local(module.weight), len(tokens)
        if grid.is_3d:
            weight = gather_parts(weight, grid.part(V), grid.width(V), grid.row)
        places = gather_parts(tokens, B, B * size, group_name) - first
        here = (places >= 0) & (places < len(weight))
        rows = F.embedding(torch.where(here, places, 0), weight)
        return sum_parts(torch.where(here[..., None], rows, 0.0), B, group_name)

    run_instead(module, forward)


def _divide_positions(grid: Grid, module: nn.Embedding) -> None:
    def forward(positions: Tensor) -> Tensor:
        return F.embedding(positions, _local(module.weight))

    run_instead(module, forward)


# -- the head and its loss ----------------------------------------------------------------------


def _divide_logits(grid: Grid, module: Any) -> None:
    """Whole logits (B, T, V) of the rows that are here."""
    _, group_name = grid.heads

    def forward(x: Tensor, weight: Tensor | None = None) -> Tensor:
        weight = weight if weight is not None else module.weight
        assert isinstance(weight, Tensor)
        own = grid.reading(weight)(x.to(product_dtype(x)), _local(weight))
        bias = grid.vector(module.bias)
        own = own if bias is None else own + bias.to(own.dtype)
        V = len(weight)
        return gathered_columns(own, grid.width(V, largest=True), V, group_name)

    run_instead(module, forward)


def _divide_loss(grid: Grid, module: HeadLoss) -> None:
    dimension, group_name = grid.heads

    @torch.compiler.disable  # as in `tensor_parallel.py`
    def parts(module: HeadLoss, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs of the loss: this process's parts of x, weight and bias, and the targets of the
        rows whose logits it has."""
        x, weight, bias, targets = given
        module.product = grid.reading(weight)
        module.widest = grid.width(len(weight), largest=True)
        module.first_column = grid.places[dimension] * module.widest
        if grid.is_3d:
            B = len(targets)
            every = gather_parts(targets, B, B * grid.layout.sizes["depth"], grid.depth)
            targets = every.split(B)[grid.places["tensor"]]
        return x, _local(weight), grid.vector(bias), targets

    module.register_forward_pre_hook(parts)
    module.reduce = partial(reduce_parts, group_name)
