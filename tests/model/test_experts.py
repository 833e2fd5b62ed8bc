"""Experts: the layer against its definition, its router, and what training leaves behind."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pentameter.config.schema import ModelConfig
from pentameter.model.experts import Experts, RestoredRows, Router, SortedRows
from pentameter.model.gpt import build_model
from pentameter.model.grouped_matmul import Groups
from pentameter.model.matmul import PLAIN
from pentameter.model.positions import Positions
from pentameter.planning.gpt import parameter_table

B, T, D, E = 3, 10, 16, 4
BASE = {
    "vocab_size": 19,
    "context_length": T,
    "n_layers": 2,
    "n_heads": 2,
    "d_model": D,
    "n_experts": E,
    "d_expert": 12,
    "init_std": 0.5,
}
VARIANTS = {
    "plain": {},
    "gates, biases, a shared expert and its gate": {
        "activation": "swiglu",
        "bias": True,
        "n_shared_experts": 2,
        "shared_expert_gate": True,
        "router_bias": True,
        "router_top_k_first": True,
    },
    "groups of sigmoids": {
        "router": "sigmoid",
        "router_renormalize": True,
        "router_scale": 2.5,
        "n_experts": 8,
        "router_groups": 4,
        "router_open_groups": 2,
        "balance": "bias",
    },
    "capacity": {"expert_capacity": 0.75},
    "one expert a token": {"experts_per_token": 1, "dense_layers": (0,)},
    "all experts": {"experts_per_token": E},
}


def experts_of(**keys: object) -> Experts:
    """The experts of a small model's last layer, in float64 and training."""
    config = ModelConfig.model_validate({**BASE, **keys})
    model = build_model(config, 3, dtype=torch.float64).train()
    experts = model.blocks["1"].get_submodule("experts")
    assert isinstance(experts, Experts)
    experts.router.counts.zero_()
    experts.router.auxiliary_loss.start_step(1.0)
    return experts


def apply(experts: Experts, x: Tensor) -> Tensor:
    where = torch.arange(x.shape[1])
    return experts(x, Positions(where, where, None))


def stream(seed: int = 0) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(experts: Experts, x: Tensor) -> Tensor:
    """The layer, one token and one expert at a time."""
    routing = experts.router(x)
    rows = []
    for token, token_x in enumerate(x.flatten(0, 1)):
        y = torch.zeros_like(token_x)
        for expert, weight in zip(routing.experts[token], routing.weights[token], strict=True):
            if expert == routing.n_experts:  # no room
                continue
            inputs = {}
            for name in ("gate", "up"):
                linear = getattr(experts, name)
                if linear is not None:
                    inputs[name] = linear.weight[expert] @ token_x
                    inputs[name] += 0 if linear.bias is None else linear.bias[expert]
            inner = experts.activation(*inputs.values())
            bias = 0 if experts.down.bias is None else experts.down.bias[expert]
            y = y + weight * (experts.down.weight[expert] @ inner + bias)
        rows.append(y)
    y = torch.stack(rows).view_as(x)
    if experts.shared is not None:
        gate = 1.0 if experts.shared_gate is None else experts.shared_gate(x).sigmoid()
        y = y + experts.shared(x) * gate
    return y


@pytest.mark.parametrize("name", VARIANTS)
def test_the_layer_and_its_gradients_are_those_of_the_definition(name: str) -> None:
    experts = experts_of(**VARIANTS[name])
    found = []
    for compute in (apply, by_definition):
        experts.zero_grad()
        x = stream().requires_grad_()
        y = compute(experts, x)
        (y * stream(1)).sum().backward()
        gradients = {n: p.grad for n, p in experts.named_parameters() if p.grad is not None}
        found.append({"y": y, "x": x.grad, **gradients})
    assert found[0].keys() == found[1].keys()
    for each, value in found[0].items():
        torch.testing.assert_close(value, found[1][each], rtol=0, atol=1e-12, msg=each)


def test_the_table_lists_the_parameters_of_the_model() -> None:
    for keys in VARIANTS.values():
        config = ModelConfig.model_validate({**BASE, **keys})
        built = build_model(config, 0).state_dict()
        table = {spec.name: spec.shape for spec in parameter_table(config)}
        assert list(table.items()) == [(name, tuple(each.shape)) for name, each in built.items()]


def test_of_equal_scores_the_lower_expert_is_chosen() -> None:
    experts = experts_of()
    with torch.no_grad():
        experts.router.weight.zero_()
    routing = experts.router(stream())
    assert routing.experts.tolist() == [[0, 1]] * (B * T)


@pytest.mark.parametrize("n_scores", [1, 2])
def test_a_group_is_opened_by_its_best_and_bounds_the_choice(n_scores: int) -> None:
    keys = {**VARIANTS["groups of sigmoids"], "router_groups": 2, "router_open_groups": 1}
    experts = experts_of(**keys, router_group_scores=n_scores)
    experts.router.balance.zero_()
    x = stream()
    scores = (x @ experts.router.weight.t()).sigmoid().flatten(0, 1)
    best = scores.unflatten(1, (2, 4)).topk(n_scores).values.sum(2).topk(1).indices
    other = scores.unflatten(1, (2, 4)).topk(3 - n_scores).values.sum(2).topk(1).indices
    assert not torch.equal(best, other)
    groups = experts.router(x).experts // 4
    for found, own in zip(groups.tolist(), best.tolist(), strict=True):
        assert set(found) <= set(own)


def test_the_bias_chooses_and_weighs_nothing() -> None:
    experts = experts_of(balance="bias", router="sigmoid")
    x = stream()
    with torch.no_grad():
        experts.router.balance.copy_(torch.tensor([10.0, 0.0, 0.0, 10.0]))
    routing = experts.router(x)
    assert {tuple(sorted(each)) for each in routing.experts.tolist()} == {(0, 3)}
    scores = (x @ experts.router.weight.t()).sigmoid().flatten(0, 1)
    torch.testing.assert_close(routing.weights, scores.gather(1, routing.experts))


def test_an_expert_takes_the_first_tokens_of_each_sequence_up_to_its_capacity() -> None:
    experts = experts_of(expert_capacity=0.5)
    with torch.no_grad():
        experts.router.weight.zero_()  # all go to experts 0 and 1
    chosen = experts.router(stream()).experts.view(B, T, 2)
    n_most = 3  # 0.5 · 10 · 2 / 4, rounded up
    expected = [[0, 1]] * n_most + [[E, E]] * (T - n_most)
    assert chosen.tolist() == [expected] * B


def test_what_stands_behind_a_token_does_not_change_its_capacity() -> None:
    experts = experts_of(expert_capacity=0.75)
    x = stream()
    whole = experts.router(x).experts.view(B, T, 2)
    assert (whole == E).any()  # some are left out
    for n in range(1, T):
        assert torch.equal(experts.router(x[:, :n]).experts.view(B, n, 2), whole[:, :n])


def test_an_expert_without_tokens_has_zero_gradients() -> None:
    experts = experts_of(activation="swiglu", bias=True)
    with torch.no_grad():
        experts.router.weight.zero_()
    apply(experts, stream()).sum().backward()
    for name in ("gate", "up", "down"):
        linear = getattr(experts, name)
        for gradient in (linear.weight.grad, linear.bias.grad):
            assert gradient[:2].abs().amax() > 0
            assert not gradient[2:].any()


def test_rows_behind_the_last_group_are_zero_and_reach_no_gradient() -> None:
    x = torch.full((4, 3), torch.nan, dtype=torch.float64)
    x[:2] = 1.0
    x.requires_grad_()
    weight = torch.ones(2, 5, 3, dtype=torch.float64, requires_grad=True)
    y = PLAIN.grouped_linear(x, weight, None, Groups(torch.tensor([0, 2])))
    assert y.tolist() == [[3.0] * 5] * 2 + [[0.0] * 5] * 2
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[5.0] * 3] * 2 + [[0.0] * 3] * 2
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("balance", ["sequence", "batch"])
def test_the_balancing_loss_is_one_where_experts_are_alike(balance: str) -> None:
    """DeepSeek-V3, equations 17 to 20, times the tokens: the mean over sequences is then 1."""
    experts = experts_of(balance=balance, balance_weight=0.25)
    with torch.no_grad():
        experts.router.weight.mul_(1e-9)  # scores of a quarter each
        if experts.router.balance is not None:
            experts.router.balance.fill_(1.0)
    apply(experts, stream()).sum().backward()
    total = float(experts.router.auxiliary_loss.total)
    assert total == pytest.approx(0.25 * B * T, rel=1e-6)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_losses_reach_the_router_as_their_definition_does(router: str) -> None:
    """The balance of each sequence by itself, whatever the number of rows, and the z-loss."""
    experts = experts_of(router=router, balance="sequence", balance_weight=0.5, router_z_loss=0.25)
    weight, x = experts.router.weight, stream()
    (apply(experts, x) * 0).sum().backward()
    logits = x @ weight.t()
    shares = logits.softmax(-1) if router == "softmax" else F.normalize(logits.sigmoid(), 1, -1)
    chosen = F.one_hot(shares.topk(2).indices, E).sum((1, 2))  # (B, E)
    balance = (chosen * E / (T * 2) * shares.sum(1)).sum()
    total = 0.5 * balance + 0.25 * logits.logsumexp(-1).square().sum()
    (expected,) = torch.autograd.grad(total, weight)
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-12)
    assert experts.router.auxiliary_loss.total.item() == pytest.approx(total.item(), rel=1e-6)


def test_however_small_the_scores_they_are_made_to_sum_to_one() -> None:
    """A number that keeps a sum from zero is one that a router of sigmoids learns to use."""
    keys = {"router": "sigmoid", "router_renormalize": True, "router_bias": True}
    experts = experts_of(**keys, balance="sequence", balance_weight=1.0)
    with torch.no_grad():
        experts.router.weight.mul_(1e-9)
        experts.router.bias.fill_(-60.0)  # scores of 1e-26
    routing = experts.router(stream())
    torch.testing.assert_close(routing.weights.sum(-1), torch.ones(B * T, dtype=torch.float64))
    routing.weights.sum().backward()
    assert float(experts.router.auxiliary_loss.total) == pytest.approx(B * T, rel=1e-6)


def test_a_sequence_is_balanced_by_itself() -> None:
    experts = experts_of(balance="sequence")
    x = stream()
    apply(experts, x).sum().backward()
    together = float(experts.router.auxiliary_loss.total)
    apart = 0.0
    for row in x:
        experts.router.auxiliary_loss.start_step(1.0)
        apply(experts, row[None]).sum().backward()
        apart += float(experts.router.auxiliary_loss.total)
    assert together == pytest.approx(apart, rel=1e-12)


@pytest.mark.parametrize("balance", ["none", "batch"])
def test_counts_are_those_of_backward_passes(balance: str) -> None:
    experts = experts_of(balance=balance)
    with torch.no_grad():
        if experts.router.balance is not None:
            experts.router.balance.fill_(1.0)
    x = stream()
    with torch.no_grad():
        apply(experts, x)
    assert not experts.router.counts.any()
    apply(experts, x).sum().backward()
    expected = experts.router(x).experts.flatten().bincount(minlength=E)
    assert experts.router.counts.tolist() == expected.tolist()


def test_a_router_computes_in_float32_under_autocast() -> None:
    experts = experts_of().float()
    x = stream().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = experts.router(x)
    exact = experts.router(x)
    assert torch.equal(rounded.weights, exact.weights)
    assert isinstance(experts.router, Router)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("position", ["pre", "post", "output"])
def test_a_model_of_16_bits_keeps_them_in_its_stream(dtype: torch.dtype, position: str) -> None:
    """As `sample --precision bf16` has one: norms and linear layers refuse wider inputs."""
    config = ModelConfig.model_validate({**BASE, "n_shared_experts": 1, "norm_position": position})
    model = build_model(config, 3).to(dtype).eval()
    tokens = torch.arange(T)[None]
    with torch.no_grad():
        found = model(tokens)
        expected = model.double()(tokens)
    assert found.dtype is dtype
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_fsdp_finds_the_tensors_that_a_router_returns():
    """As torch 2.11 looks for them; without, a router's weight was not there for the backward pass
    of ZeRO 3."""
    router = Router(ModelConfig(**BASE)).train()
    torch.nn.init.normal_(router.weight)
    returned = tree_leaves(router(torch.randn(B, T, D)))
    assert any(isinstance(each, Tensor) and each.requires_grad for each in returned)


class Writes(TorchDispatchMode):
    """Collects the operations that write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_new_models_routers_have_counted_nothing_and_its_losses_count_once():
    """Though its memory comes without values (`tests/kit/unset_memory.py`)."""
    model = build_model(ModelConfig(**BASE, balance="batch"), 0)
    for module in model.modules():
        if isinstance(module, Router):
            assert not module.counts.any()
            assert not module.logit_sums.any()
            assert (module.auxiliary_loss.factor, module.auxiliary_loss.total) == (1, 0)


def test_functions_that_move_rows_write_nothing_in_place() -> None:
    x, order = torch.randn(4, 3, requires_grad=True), torch.randperm(8)
    with Writes() as writes:
        rows = SortedRows.apply(x, order, 2)
        restored = RestoredRows.apply(rows, order)
    assert writes.found == []  # or torch 2.11 loses gradients in compiled code
    assert torch.equal(restored, x.repeat_interleave(2, 0))
