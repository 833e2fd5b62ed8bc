import pytest
import torch

from pentameter.model.loss import loss_sum


def test_ignored_targets_and_padded_columns_do_not_count() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 6, (2, 5), generator=generator)
    targets[0, 3] = targets[1, 0] = -1
    expected = 0.0
    for row in range(2):
        for time in range(5):
            if targets[row, time] >= 0:
                scores = logits[row, time, :6].exp()
                expected -= (scores[targets[row, time]] / scores.sum()).log().item()
    loss = loss_sum(logits, targets, 6)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    logits[..., 6:] += 100
    assert loss_sum(logits, targets, 6).item() == pytest.approx(expected, rel=1e-12)


def test_padded_columns_get_no_gradient() -> None:
    logits = torch.zeros(1, 3, 8, requires_grad=True)
    loss_sum(logits, torch.tensor([[0, 5, -1]]), 6).backward()
    assert logits.grad is not None
    assert torch.count_nonzero(logits.grad[..., 6:]) == 0
    assert torch.count_nonzero(logits.grad[0, 2]) == 0


@pytest.mark.parametrize(
    ("given", "result"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_the_sum_is_at_least_fp32(given: torch.dtype, result: torch.dtype) -> None:
    logits = torch.zeros(1, 3, 8, dtype=given)
    assert loss_sum(logits, torch.zeros(1, 3, dtype=torch.int64), 8).dtype == result


def test_no_targets_lose_nothing() -> None:
    assert loss_sum(torch.zeros(1, 3, 8), torch.full((1, 3), -1), 8).item() == 0
