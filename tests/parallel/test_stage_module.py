"""The compiled graph of a stage: the same numbers whatever else the machine does."""

from __future__ import annotations

import torch

from pentameter.config.schema import ModelConfig
from pentameter.model.gpt import build_model
from pentameter.parallel.precision import arithmetic
from pentameter.parallel.sources.gpt_source import gpt_slice
from pentameter.parallel.stage_module import StageModule, adding_in_one_order

CPU = torch.device("cpu")


def test_a_compiled_graph_adds_up_an_embeddings_gradient_in_one_order():
    """Many tokens of few kinds, by two threads: atomic additions come in another order each time,
    and rounded sums differ."""
    config = ModelConfig(
        vocab_size=3, context_length=256, n_layers=1, d_model=16, n_heads=1, tied_head=False
    )
    torch.manual_seed(0)
    model = build_model(config, seed=1)
    part = StageModule(gpt_slice(model), CPU, arithmetic("fp32")).train()
    part.run_compiled()
    tokens = torch.randint(3, (32, 256))
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gradients = [_embedding_gradient(part, tokens) for _ in range(12)]
    finally:
        torch.set_num_threads(n_threads)
    assert all(torch.equal(each, gradients[0]) for each in gradients)
    assert not torch.are_deterministic_algorithms_enabled()


def _embedding_gradient(part: StageModule, tokens: torch.Tensor) -> torch.Tensor:
    part.zero_grad()
    with adding_in_one_order([part]):
        part(tokens, tokens).sum().backward()
    gradients = dict(part.model.named_parameters())["token_embedding.weight"].grad
    assert gradients is not None
    return gradients.clone()
