"""The three matmuls of a linear layer."""

import pytest
import torch

from pentameter.model.matmul import PLAIN, exact_linear, matmul_dtype

X, WEIGHT, G = (
    torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for shape in ((5, 3), (4, 3), (5, 4))
)


def test_gradients_are_those_of_autograd():
    x, weight = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    expected = torch.autograd.grad(PLAIN.linear(x, weight), (x, weight), G)
    found = PLAIN.input_gradient(G, WEIGHT), PLAIN.weight_gradient(G, X)
    torch.testing.assert_close(found, expected)
    totals = torch.ones_like(X), torch.ones_like(WEIGHT)
    PLAIN.input_gradient(G, WEIGHT, totals[0])
    PLAIN.weight_gradient(G, X, totals[1])
    torch.testing.assert_close(totals, tuple(each + 1 for each in expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_weights_gradient_is_added_up_at_least_in_float32(dtype):
    precise = torch.promote_types(dtype, torch.float32)
    g, x, weight = (each.to(dtype) for each in (G, X, WEIGHT))
    total = torch.ones_like(WEIGHT, dtype=precise)
    x_grad = PLAIN.differentiate(g, x, weight, total)
    assert x_grad.dtype == dtype
    torch.testing.assert_close(x_grad, g @ weight)
    expected = (g.double().t() @ x.double() + 1).to(precise)
    torch.testing.assert_close(total, expected, rtol=4 * torch.finfo(dtype).eps, atol=0.05)


def test_matmuls_read_autocasts_dtype():
    assert matmul_dtype(X) == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul_dtype(X) == torch.bfloat16


def test_what_is_exact_stays_float32_where_matmuls_are_rounded() -> None:
    """A CPU with bf16, or a GPU with TF32, would round all three products."""
    x, weight, g = (each.float() for each in (X[:, None], WEIGHT, G[:, None]))
    bias = torch.ones(4)

    def computed(linear) -> list[torch.Tensor]:
        inputs = [each.clone().requires_grad_() for each in (x, weight, bias)]
        y = linear(*inputs)
        return [y, *torch.autograd.grad(y, inputs, g)]

    before, seen = torch.get_float32_matmul_precision(), []
    multiply = torch.Tensor.__matmul__

    def spy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return multiply(a, b)

    expected = computed(torch.nn.functional.linear)
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "__matmul__", spy)
            found = computed(exact_linear)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["highest"] * 3
    torch.testing.assert_close(found, expected)


def test_a_graph_multiplies_as_told_when_it_runs_not_when_it_was_made() -> None:
    """A graph breaks where a trace meets a word of torch's: there must be none here."""
    x, weight = X.float(), WEIGHT.float()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(exact_linear, fullgraph=True, dynamic=False, backend=keep)
    before = torch.get_float32_matmul_precision()
    try:
        for precision, n_graphs in (("highest", 1), ("high", 2), ("highest", 2)):
            torch.set_float32_matmul_precision(precision)
            torch.testing.assert_close(compiled(x, weight, None), exact_linear(x, weight, None))
            assert len(graphs) == n_graphs
    finally:
        torch.set_float32_matmul_precision(before)
    assert ["exact_product" in each.code for each in graphs] == [False, True]
