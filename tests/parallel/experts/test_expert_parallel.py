"""Rows find their experts on other ranks, and their way back: also none, also in uneven numbers."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from measured import configuration, engine_of, own_batch
from torch import Tensor

from pentameter.model.experts import Experts, Routing
from pentameter.parallel.experts import expert_parallel
from pentameter.parallel.experts.expert_parallel import ExpertExchange, TokenShards
from pentameter.parallel.mesh import build_mesh
from pentameter.planning.layouts.layout import Layout

E, D, N = 4, 3, 7
COUNTS = {
    "uneven": [[3, 0, 1, 2], [1, 1, 0, 3], [0, 4, 0, 0], [2, 2, 2, 2]],
    "all to the first rank": [[4, 1, 0, 0], [5, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]],
    "none at all": [[0, 0, 0, 0]] * 4,
}
"""Rows that each of four ranks has for each expert."""


def weights() -> Tensor:
    """One matrix (D, D) for each expert."""
    return torch.arange(E * D * D, dtype=torch.float64).view(E, D, D).sin()


def rows_of(rank: int, counts: list[int]) -> Tensor:
    """Rows (R, D) of a rank, with one more behind the last that no expert has room for."""
    n = sum(counts) + 1
    return (torch.arange(n * D, dtype=torch.float64) + 100 * rank).view(n, D).cos()


@pytest.mark.parametrize("expert_tensor", [1, 2])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_every_row_is_multiplied_by_its_expert(processes, counts, expert_tensor):
    layout = Layout(data=4, expert=4 // expert_tensor, expert_tensor=expert_tensor)
    found = processes.run(4, exchanged, layout, counts)
    matrices = weights()
    for rank, (outputs, row_gradients, _) in enumerate(found):
        rows = rows_of(rank, counts[rank]).requires_grad_()
        blocks = rows.split([*counts[rank], 1])
        expected = torch.cat([x @ w.T for x, w in zip(blocks[:-1], matrices, strict=True)])
        torch.testing.assert_close(outputs[:-1], expected)
        assert not outputs[-1].any()
        expected.square().sum().backward()
        torch.testing.assert_close(row_gradients, rows.grad)


def exchanged(world, layout, counts):
    """Outputs and gradients of the rows of this rank, and the numbers of rows that its experts
    got. Of the columns of its matrices it has a shard."""
    mesh = build_mesh(layout, "cpu", world)
    place = layout.parameter_coordinates(world.rank)
    here = weights().chunk(layout.expert)[place["expert"]].chunk(layout.expert_tensor, -1)
    matrices = here[place["expert_tensor"]]
    columns = torch.arange(D).chunk(layout.expert_tensor)[place["expert_tensor"]]
    received = []

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        received.append(len(rows))
        blocks = rows[:, columns].split(ends.diff(prepend=ends.new_zeros(1)).tolist())
        return torch.cat([x @ w.T for x, w in zip(blocks, matrices, strict=True)])

    rows = rows_of(world.rank, counts[world.rank]).requires_grad_()
    ends = torch.tensor(counts[world.rank]).cumsum(0)
    exchange = ExpertExchange(mesh.group_name("expert"), layout.expert_tensor)
    outputs = exchange.outputs(compute, exchange.dispatch(rows, ends))
    outputs.square().sum().backward()
    return outputs.detach(), rows.grad, received


def test_a_rank_without_rows_takes_part(processes):
    counts = COUNTS["all to the first rank"]
    received = [each for _, _, (each,) in processes.run(4, exchanged, Layout(4, expert=4), counts)]
    assert received == [10, 2, 0, 0]


@pytest.mark.parametrize("n_tokens", [8, 7, 3])
def test_ranks_with_the_same_tokens_shard_them(processes, n_tokens):
    """With three tokens for four ranks, the last one has none."""
    whole = torch.arange(n_tokens * D, dtype=torch.float64).view(n_tokens, D)
    for y, x_gradient, weight_gradient, n in processes.run(4, sharded_tokens, n_tokens):
        torch.testing.assert_close(y, whole * 3)
        torch.testing.assert_close(x_gradient, 2 * whole * 9)  # alike on every rank
        torch.testing.assert_close(weight_gradient, (2 * whole * 3 * whole).sum(1, keepdim=True))
        assert n <= -(-n_tokens // 4)


def sharded_tokens(world, n_tokens):
    layout = Layout(tensor=4, expert=2)
    mesh = build_mesh(layout, "cpu", world)
    shards = TokenShards(world.rank, 4, mesh.group_name("tensor"))
    x = torch.arange(n_tokens * D, dtype=torch.float64).view(n_tokens, D).requires_grad_()
    factors = torch.full((n_tokens, 1), 3.0, dtype=torch.float64, requires_grad=True)
    routing = Routing(torch.zeros(n_tokens, 1, dtype=torch.int64), factors, E)
    own, own_routing = shards.shard(x, routing)
    y = shards.gather(own * own_routing.weights, n_tokens)
    y.square().sum().backward()
    return y.detach(), x.grad, factors.grad, len(own)


@pytest.mark.parametrize("recomputed", [None, "full", "selective"])
def test_shared_experts_are_computed_while_rows_are_under_way(processes, recomputed):
    """Forward: between sending rows and waiting for them. Backward: between the gradients'."""
    out, back = ["send", "shared experts", "wait"], ["send", "wait"]
    forward = [*out, *back]
    again = {None: [], "full": forward, "selective": ["shared experts"]}[recomputed]
    backward = [*back, "send", "gradients of shared experts", "wait"]
    for events in processes.run(2, order_of_work, recomputed):
        assert events == [*forward, *again, *backward]


def order_of_work(world, recomputed):
    """The order of sends, waits and shared experts in a step on this rank."""
    sizes = {"n_experts": 4, "d_expert": 6, "n_shared_experts": 1, "n_layers": 1, "dropout": 0.0}
    train = {"precision": "fp64", "activation_checkpoint": recomputed}
    config = configuration("data=2,expert=2", sizes, train)
    _, engine = engine_of(world, config)
    (experts,) = (each for each in engine.models[0].modules() if isinstance(each, Experts))
    events: list[str] = []
    experts.shared.register_forward_hook(lambda *_: events.append("shared experts"))
    experts.shared.register_full_backward_hook(
        lambda *_: events.append("gradients of shared experts")
    )
    start, finish = dist.all_to_all_single, expert_parallel.finish

    def noted_start(*arguments, async_op=False, **options):
        if async_op:  # rows; their counts are waited for
            events.append("send")
        return start(*arguments, async_op=async_op, **options)

    def noted_finish(*arguments):
        events.append("wait")
        finish(*arguments)

    with (
        mock.patch.object(dist, "all_to_all_single", noted_start),
        mock.patch.object(expert_parallel, "finish", noted_finish),
    ):
        engine.forward_backward(own_batch(engine, 0), 0)
    return events
