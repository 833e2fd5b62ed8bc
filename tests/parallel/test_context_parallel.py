"""Attention by processes that divide time: the numbers of one process, whichever way."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pentameter.config.schema import ModelConfig
from pentameter.model.attention.dot_product import PLAIN_ATTENTION, Weighting
from pentameter.model.dropout import AttentionDropout, WeightsDropout, dropout_keys
from pentameter.parallel.context.context_parallel import own_positions
from pentameter.parallel.context.run_attention import run_attention
from pentameter.parallel.mesh import build_mesh
from pentameter.planning.layouts.layout import Layout

B, H, T, K = 2, 4, 32, 8
MODES = ("ring", "all-to-all")


@dataclass(frozen=True)
class Asked:
    """What the processes of a group compute: `tile` bounds the blocks that are written out."""

    layout: Layout
    dtype: torch.dtype = torch.float64
    dropout: float = 0.0
    tile: int = 1024
    explicit: bool = False
    sinks: bool = False


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the gradient of their result, (B, H, T, K)."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, T, K, generator=generator, dtype=dtype) for _ in range(4)]


def given(asked: Asked, tokens: torch.Tensor | slice) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v at these tokens and, if asked, sinks, (H,), to be differentiated; and the gradient of
    the result."""
    *qkv, grad = (each[:, :, tokens].contiguous() for each in tensors(asked.dtype))
    sinks = [torch.linspace(-1, 2, H, dtype=asked.dtype)] if asked.sinks else []
    return [each.requires_grad_() for each in (*qkv, *sinks)], grad


def weights_dropout(p: float) -> WeightsDropout | None:
    return AttentionDropout(1, p, T).train().acting(keys())


def keys() -> torch.Tensor:
    config = ModelConfig(vocab_size=2, context_length=T, n_layers=1, n_heads=H, d_model=H * K)
    return dropout_keys(config, 3, 5, range(B))


def whole(asked: Asked) -> list[torch.Tensor]:
    """The result of one process, and the gradients of q, k and v, and of sinks if there are."""
    inputs, grad = given(asked, slice(None))
    q, k, v, *sinks = inputs
    y = PLAIN_ATTENTION(
        q, k, v, Weighting(None, *(sinks or [None]), weights_dropout(asked.dropout))
    )
    return [y, *torch.autograd.grad(y, inputs, grad)]


def part(world, asked: Asked) -> list[torch.Tensor]:
    """The same, of the positions that this process has."""
    attend = run_attention(asked.layout, T, build_mesh(asked.layout, "cpu", world))
    own = own_positions(asked.layout, world.rank, torch.arange(T))
    inputs, grad = given(asked, own)
    q, k, v, *sinks = inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pentameter.parallel.context.ring_attention.TILE", asked.tile)
        if asked.explicit:
            kernel = "pentameter.parallel.context.ring_attention.block_kernel"
            patch.setattr(kernel, lambda *_: None)
        dropout = weights_dropout(asked.dropout)
        y = attend(q, k, v, Weighting(None, *(sinks or [None]), dropout, own))
        return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


CASES = [
    *(Asked(Layout(context=n, context_mode=mode)) for n in (2, 4) for mode in MODES),
    *(Asked(Layout(context=2, context_mode=mode), dropout=0.3) for mode in MODES),
    Asked(Layout(context=2), dropout=0.3, tile=3),  # tiles that do not divide a chunk of 8
    Asked(Layout(context=2), explicit=True, tile=3),
    Asked(Layout(context=2), explicit=True, dtype=torch.float32),
    Asked(Layout(context=4), dtype=torch.float32),
    *(Asked(Layout(context=2, context_mode=mode), sinks=True) for mode in MODES),
    Asked(Layout(context=2), dropout=0.3, tile=3, sinks=True),
]


@pytest.mark.parametrize("asked", CASES, ids=str)
def test_results_and_gradients_are_those_of_one_process(processes, asked):
    parts = processes.run(asked.layout.context, part, asked)
    order = torch.cat(
        [own_positions(asked.layout, place, torch.arange(T)) for place in range(len(parts))]
    )
    assert sorted(order.tolist()) == list(range(T))
    tolerance = 1e-13 if asked.dtype == torch.float64 else 1e-5
    for expected, *got in zip(whole(asked), *parts, strict=True):
        is_whole = expected.ndim == 1  # of sinks, which each has the gradient of its queries for
        together = torch.stack(got).sum(0) if is_whole else torch.cat(got, dim=2)
        one = expected if is_whole else expected[:, :, order]
        torch.testing.assert_close(
            together, one, rtol=tolerance, atol=tolerance, check_stride=False
        )


@pytest.mark.parametrize("mode", MODES)
def test_bf16_is_as_close_to_the_exact_result_as_in_one_process(processes, mode):
    asked = Asked(Layout(context=2, context_mode=mode), dtype=torch.bfloat16)
    exact = Asked(Layout(), dtype=torch.float64)
    *qkv, grad = (each.double() for each in tensors(torch.bfloat16))
    qkv = [each.requires_grad_() for each in qkv]
    y = PLAIN_ATTENTION(*qkv)
    precise = [y, *torch.autograd.grad(y, qkv, grad)]
    assert exact.layout.context == 1
    parts = processes.run(2, part, asked)
    order = torch.cat([own_positions(asked.layout, place, torch.arange(T)) for place in (0, 1)])
    for expected, one, *got in zip(precise, whole(asked), *parts, strict=True):
        error = (torch.cat(got, dim=2).double() - expected[:, :, order]).abs().mean()
        assert error < 1.5 * (one.double() - expected).abs().mean()


def test_chunks_of_a_ring_are_as_much_work_for_each():
    layout = Layout(context=4)
    work = [sum(sum(piece) for piece in layout.positions(place, 32)) for place in range(4)]
    assert len(set(work)) == 1
    assert layout.positions(1, 32) == (range(4, 8), range(24, 28))
    assert layout.holder(25, 32) == (1, 5)
    assert Layout(context=4, context_mode="all-to-all").positions(1, 32) == (range(8, 16),)
    assert Layout().positions(0, 7) == (range(7),)
    with pytest.raises(ValueError, match="position 32"):
        layout.holder(32, 32)
