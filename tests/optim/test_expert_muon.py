"""Muon for stacks of matrices: for each what PyTorch's Muon does with it alone."""

import pytest
import torch
from torch.nn import Parameter

from pentameter.config.schema import ModelConfig, OptimizerConfig
from pentameter.model.gpt import build_model
from pentameter.optim.build import build_optimizer
from pentameter.optim.expert_muon import ExpertMuon, orthogonalized
from pentameter.planning.gpt import parameter_table

MODEL = ModelConfig(
    vocab_size=11,
    context_length=8,
    n_layers=2,
    n_heads=2,
    d_model=8,
    dense_layers=1,
    n_experts=3,
    n_shared_experts=1,
    shared_expert_gate=True,
    activation="swiglu",
    bias=True,
)


def noise(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", [(4, 24, 10), (3, 10, 24), (1, 7, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_matrix_gets_the_update_of_muon_on_it_alone(shape, dtype):
    start = noise(*shape, seed=0, dtype=dtype)
    stack, alone = Parameter(start.clone()), [Parameter(each.clone()) for each in start]
    ours = ExpertMuon([{"params": [stack], "weight_decay": 0.1}], lr=0.02, momentum=0.9)
    theirs = torch.optim.Muon(
        alone, lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        gradient = noise(*shape, seed=step + 1, dtype=dtype)
        stack.grad = gradient.clone()
        for parameter, each in zip(alone, gradient, strict=True):
            parameter.grad = each.clone()
        ours.step()
        theirs.step()
    moved, expected = (x.detach() - start for x in (stack, torch.stack(alone)))
    # The iteration computes in bf16: a sum that is made in another order may round otherwise.
    torch.testing.assert_close(moved, expected, rtol=0, atol=2e-2 * float(expected.abs().max()))
    buffer = torch.stack([theirs.state[each]["momentum_buffer"] for each in alone])
    assert torch.equal(ours.state[stack]["momentum_buffer"], buffer)


def test_many_at_once_are_as_good_as_one_after_another():
    """As on a GPU: near 1 singular values, and the singular vectors of each matrix."""
    matrices = noise(5, 12, 40, seed=0)
    found = orthogonalized(matrices).float()
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    values = torch.einsum("eni,enk,eik->ei", left, found, right)
    assert values.min() > 0.65
    assert values.max() < 1.3
    assert (found - left * values[:, None] @ right).abs().max() < 0.03


def test_a_stack_without_experts_is_left_alone():
    """As a rank holds where there are fewer experts than ranks."""
    empty = Parameter(torch.empty(0, 4, 6))
    empty.grad = torch.empty(0, 4, 6)
    ExpertMuon([{"params": [empty]}], lr=0.02, momentum=0.9).step()


def test_routers_and_their_kin_are_left_to_adamw():
    model = build_model(MODEL, 0)
    config = OptimizerConfig(name="muon", weight_decay=0.1)
    optimizer = build_optimizer(model.named_parameters(), parameter_table(MODEL), config)
    name_of = {id(p): name for name, p in model.named_parameters()}
    muon, experts, adamw = (
        {
            name_of[id(p)]: group["weight_decay"]
            for group in part.param_groups
            for p in group["params"]
        }
        for part in optimizer.parts
    )
    names = ("gate.weight", "up.weight", "down.weight")
    assert experts == {f"blocks.1.experts.{name}": 0.1 for name in names}
    assert {f"blocks.1.experts.shared.{name}" for name in names} < muon.keys()
    assert adamw["blocks.1.experts.router.weight"] == 0.0
    assert adamw["blocks.1.experts.up.bias"] == 0.0
    assert adamw["blocks.1.experts.shared_gate.weight"] == 0.1
