"""The router's kernels give what the plain model's router gives, in registers of any width."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import check_same_on_any_threads

from pentameter.config.schema import ModelConfig
from pentameter.fused_cpu.experts import router as fused
from pentameter.fused_cpu.experts.router import route, router_logits
from pentameter.model.experts import Router

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def router_of(n_experts=6, k=2, **keys):
    """A router in training whose balance, if it has one, puts some experts first or last."""
    config = ModelConfig(
        **{"vocab_size": 13, "context_length": 64, "n_layers": 1, "n_heads": 2, "d_model": 16},
        **{"n_experts": n_experts, "experts_per_token": k, "d_expert": 16},
        **keys,
    )
    router = Router(config).train()
    if router.balance is not None:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            router.balance.copy_(torch.randint(-1, 2, (n_experts,), generator=generator) * 10.0)
    return router


def random_logits(seed, *shape):
    """Multiples of 1/8 between -2 and 2: many are equal, and scores that are not differ by far more
    than their rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, shape, generator=generator) / 8


def routed(route, router, logits, g):
    """The routing, the logits' gradient and what the backward pass adds to the router's tensors."""
    logits = logits.clone().requires_grad_()
    routing = route(router, logits)
    routing.weights.backward(g)
    return (
        routing.experts,
        routing.weights.detach(),
        logits.grad,
        router.counts,
        router.logit_sums,
    )


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 37), st.integers(2, 19)),
    st.integers(1, 19),
    st.sampled_from(
        [
            {"router": "softmax"},
            {"router": "softmax", "router_top_k_first": True},
            {"router": "softmax", "router_renormalize": True, "balance": "bias"},
            {"router": "sigmoid"},
            {"router": "sigmoid", "router_renormalize": True, "balance": "bias"},
        ]
    ),
    st.sampled_from([1.0, 2.5]),
    st.sampled_from([None, 0.5]),
    st.integers(0, 1 << 30),
)
def test_a_choice_is_that_of_the_plain_router(width, shape, k, keys, scale, capacity, seed):
    keys = {**keys, "router_scale": scale, "expert_capacity": capacity}
    E, k = shape[-1], min(k, shape[-1])
    logits = random_logits(seed, *shape)
    g = torch.randn(shape[0] * shape[1], k, generator=torch.Generator().manual_seed(seed))
    experts, *found = routed(route, router_of(E, k, **keys), logits, g)
    plain = router_of(E, k, **keys).double()
    plain_experts, *expected = routed(Router.route, plain, logits.double(), g.double())
    assert torch.equal(experts, plain_experts)
    for each, exact in zip(found, expected, strict=True):
        assert each.dtype == torch.float32
        # Some roundings of numbers up to 2.5; those of a gradient may cancel each other.
        torch.testing.assert_close(each.double(), exact, rtol=3e-6, atol=3e-6)


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 90), st.sampled_from([16, 48, 80])),
    st.integers(1, 37),
    st.sampled_from(list(ROUNDING)),
    st.integers(0, 1 << 30),
)
def test_logits_and_their_gradients_equal_the_formula(width, shape, E, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    B, T, D = shape
    shapes = shape, (D,), (E, D), (B, T, E)
    h, scale, weight, g = (torch.randn(each, generator=generator) for each in shapes)
    h = h.to(dtype)

    def computed(formula, *given):
        *leaves, g = given
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        y = formula(*leaves)
        y.backward(g)
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    def exact(h, scale, weight):
        return (h * scale) @ weight.t()

    given = h, scale, weight, g
    precise = [each.double() for each in given]
    sums_of_sizes = computed(exact, *(each.abs() for each in precise))
    for found, expected, size in zip(
        computed(router_logits, *given), computed(exact, *precise), sums_of_sizes, strict=True
    ):
        assert (found.double() - expected).norm() < ROUNDING[found.dtype] * size.norm()


def test_logits_that_are_not_numbers_choose_each_expert_once(width):
    logits = random_logits(1, 1, 5, 6)
    logits[0, 1] = torch.nan
    logits[0, 2, 3] = torch.nan
    router = router_of(k=4)
    experts = route(router, logits).experts
    assert torch.equal(experts, router.route(logits).experts)
    assert all(len(set(row)) == 4 for row in experts.tolist())


def test_no_choice_depends_on_threads(loaded):
    h, g = torch.randn(3, 60, 16), torch.randn(180, 2)

    def computed():
        router = router_of(router_renormalize=True)
        leaves = [h, torch.ones(16), torch.linspace(-1, 1, 96).view(6, 16)]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        routing = route(router, router_logits(*leaves))
        routing.weights.backward(g)
        return [
            routing.experts,
            routing.weights.detach(),
            *(leaf.grad for leaf in leaves),
            router.counts,
            router.logit_sums,
        ]  # fmt: skip

    check_same_on_any_threads(computed)


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        ({}, True),
        ({"expert_capacity": 1.0}, True),
        ({"router_groups": 3, "router_open_groups": 2}, False),
        ({"router_z_loss": 0.1}, False),
        ({"balance": "sequence"}, False),
        ({"balance": "batch"}, False),
    ],
)
def test_what_the_kernels_do_not_know_is_left_to_the_plain_router(loaded, monkeypatch, keys, taken):
    calls = []
    apply = fused._ChosenExperts.apply
    monkeypatch.setattr(
        fused._ChosenExperts, "apply", lambda *given: calls.append(given) or apply(*given)
    )
    router, logits = router_of(**keys), random_logits(2, 2, 9, 6)
    assert torch.equal(route(router, logits).experts, router.route(logits).experts)
    assert bool(calls) == taken
    route(router.double(), logits.double())
    assert len(calls) == taken
    route(router.float().eval(), logits)  # without its loss
    assert len(calls) == taken + ("router_groups" not in keys)
