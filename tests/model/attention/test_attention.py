import pytest
import torch

from pentameter.model.attention.dot_product import (
    PLAIN_ATTENTION,
    Weighting,
    attend_explicitly,
)
from pentameter.model.dropout import AttentionDropout, Numbers, keep_mask


def qkv(n_queries: int, n_keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> torch.Tensor:
        shape = (2, 3, n, 4)
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return draw(n_queries), draw(n_keys), draw(n_keys)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(7, 7), (1, 7), (3, 7), (1, 1)])
def test_fused_and_explicit_agree_in_value_and_gradient(n_queries: int, n_keys: int) -> None:
    q, k, v = qkv(n_queries, n_keys)
    results = []
    for function in (PLAIN_ATTENTION, attend_explicitly):
        y = function(q, k, v)
        results.append((y, *torch.autograd.grad((y * y.detach().cos()).sum(), (q, k, v))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_dropout_drops_the_weights_of_the_formula() -> None:
    q, k, v = qkv(5, 5)
    keys = torch.tensor([[[1, 2], [30, 40]], [[5, 6], [70, 80]]], dtype=torch.int32)
    dropout = AttentionDropout(site=1, p=0.4, context_length=6)
    h, i, j = torch.meshgrid(*map(torch.arange, (3, 5, 5)), indexing="ij")
    keep = keep_mask(keys[:, 1], Numbers(((h * 6 + i) * 6 + j).int()), 0.4)
    scores = torch.einsum("bhqk,bhsk->bhqs", q, k) / 2
    scores = scores.masked_fill(j > i, float("-inf"))
    expected = (scores.softmax(-1) * keep / 0.6) @ v
    y = PLAIN_ATTENTION(q, k, v, Weighting(dropout=dropout.acting(keys)))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_dropout_has_the_right_gradient() -> None:
    q, k, v = qkv(4, 4)
    keys = torch.tensor([[[3, 4]], [[5, 6]]], dtype=torch.int32)
    dropout = AttentionDropout(site=0, p=0.3, context_length=4)
    assert torch.autograd.gradcheck(
        lambda q, k, v: PLAIN_ATTENTION(q, k, v, Weighting(dropout=dropout.acting(keys))), (q, k, v)
    )


def test_no_dropout_in_evaluation_or_without_keys() -> None:
    q, k, v = qkv(4, 4)
    keys = torch.tensor([[[3, 4]], [[5, 6]]], dtype=torch.int32)
    dropout = AttentionDropout(site=0, p=0.3, context_length=4)
    plain = PLAIN_ATTENTION(q, k, v)
    for acting in (dropout.acting(None), dropout.eval().acting(keys)):
        assert torch.equal(PLAIN_ATTENTION(q, k, v, Weighting(dropout=acting)), plain)
