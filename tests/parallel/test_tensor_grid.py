"""What processes of a grid compute together: the numbers of one process, part by part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pentameter.config.schema import ModelConfig
from pentameter.model.gpt import GPT
from pentameter.parallel.grid.tensor_grid import Grid
from pentameter.parallel.mesh import build_mesh
from pentameter.parallel.precision import arithmetic
from pentameter.parallel.tensor.sharded_norm import sharded_norm
from pentameter.planning.gpt import operations
from pentameter.planning.layouts.layout import Layout, parse_layout
from pentameter.planning.layouts.sharding import Sharding

TWO, THREE = "tensor=4,tensor_mode=2d", "tensor=8,tensor_mode=3d"
R, D, V = 8, 12, 13  # rows of all, channels, and outputs that nothing divides


def whole(dtype: torch.dtype) -> list[torch.Tensor]:
    """Inputs (R, D), a weight (V, D) and the gradient of the product (R, V)."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((R, D), (V, D), (R, V))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def part(n: int, n_parts: int, place: int) -> slice:
    """The numbers of a part, as `torch.chunk` cuts them."""
    most = -(-n // n_parts)
    return slice(min(n, place * most), min(n, (place + 1) * most))


def regions(layout: Layout, rank: int) -> tuple[tuple[slice, slice], ...]:
    """Where the parts of inputs, weight and result lie that a process has."""
    at, edge = layout.coordinates(rank), layout.sizes["row"]
    i, j, d = at["row"], at["tensor"], at["depth"]
    if layout.tensor_mode == "2d":
        rows = part(R, edge, i)
        return (
            (rows, part(D, edge, j)),
            (part(V, edge, i), part(D, edge, j)),
            (rows, part(V, edge, j)),
        )
    block = part(V, edge * edge, 0).stop * edge
    columns = slice(min(V, d * block), min(V, (d + 1) * block))
    return (
        (part(R, edge * edge, d * edge + i), part(D, edge, j)),
        (part(V, edge * edge, d * edge + i), part(D, edge, j)),
        (part(R, edge * edge, j * edge + i), columns),
    )


def products(world, text: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """This process's parts of the product and of the gradients of inputs and weight."""
    layout = parse_layout(text)
    grid = Grid(
        Sharding(layout, n_kv_heads=4), arithmetic("fp64"), build_mesh(layout, "cpu", world)
    )
    x, weight, g = (
        tensor[region].contiguous()
        for tensor, region in zip(whole(dtype), regions(layout, world.rank), strict=True)
    )
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = grid.columns_matmul(torch.empty(V, D)).linear(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), g)]


@pytest.mark.parametrize("layout", [TWO, THREE])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 0.1)])
def test_a_product_and_its_gradients_are_those_of_one_process(processes, layout, dtype, tolerance):
    """bf16 rounds each part of a sum to 8 bits; the largest sums here are near 10."""
    x, weight, g = (tensor.double() for tensor in whole(dtype))
    expected = (x @ weight.t(), g @ weight, g.t() @ x)
    parsed = parse_layout(layout)
    for rank, found in enumerate(processes.run(parsed.world_size, products, layout, dtype)):
        of_x, of_weight, of_y = regions(parsed, rank)
        for own, tensor, region in zip(found, expected, (of_y, of_x, of_weight), strict=True):
            assert own.dtype == dtype
            torch.testing.assert_close(own.double(), tensor[region], rtol=0, atol=tolerance)


def norms(world, centred: bool, shift: float) -> list[torch.Tensor]:
    """This process's channels of a norm, and the gradients of all that it reads."""
    layout = parse_layout(TWO)
    grid = Grid(
        Sharding(layout, n_kv_heads=4), arithmetic("fp64"), build_mesh(layout, "cpu", world)
    )
    place = grid.coordinates["tensor"]
    generator = torch.Generator().manual_seed(1)
    x, g = torch.randn(2, 2, 3, D, generator=generator, dtype=torch.float64) + shift
    weight, bias = torch.randn(2, D, generator=generator, dtype=torch.float64)
    mine = part(D, 2, place)
    read = [each[..., mine].clone().requires_grad_() for each in (x, weight, bias)]
    y, _ = sharded_norm(*read, 1e-5, centred, grid.tensor)
    own = [y.detach(), *torch.autograd.grad(y, read, g[..., mine])]
    read = [each.clone().requires_grad_() for each in (x, weight, bias)]
    if centred:
        y = F.layer_norm(read[0], (D,), read[1], read[2], eps=1e-5)
    else:
        y = F.rms_norm(read[0], (D,), read[1], eps=1e-5) + read[2]
    true = [y.detach(), *torch.autograd.grad(y, read, g)]
    return [(a - b[..., mine]).abs().max() for a, b in zip(own, true, strict=True)]


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_a_norm_over_divided_channels_is_the_whole_one(processes, centred, shift):
    """Also where the mean is large: no sum of squares loses the variance in it."""
    for errors in processes.run(4, norms, centred, shift):
        assert max(errors) < (1e-13 if shift == 0 else 1e-6)


VARIANTS = [
    {},
    {"tied_head": False},
    {"norm_position": "post"},
    {"n_kv_heads": 1, "activation": "swiglu", "qk_norm": "width"},
]


@pytest.mark.parametrize("changed", VARIANTS, ids=str)
def test_every_module_with_parameters_has_a_style(changed):
    config = ModelConfig(
        vocab_size=19, context_length=8, n_layers=2, n_heads=2, d_model=8, **changed
    )
    with_parameters = {op.name: op.role for op in operations(config) if op.parameters}
    assert set(with_parameters.values()) <= Grid.styles.keys()
    assert with_parameters.keys() <= {path for path, _ in GPT(config).named_modules()}
