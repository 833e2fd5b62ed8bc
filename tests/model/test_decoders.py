"""Today's decoders: rotary positions, shared heads, windows, norms of heads, and their cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pentameter.config.model.architecture import ModelConfig
from pentameter.config.model.rope_scaling import RopeScalingConfig
from pentameter.model.attention.cache import KVCache
from pentameter.model.attention.dot_product import (
    PLAIN_ATTENTION,
    Weighting,
    attend_explicitly,
)
from pentameter.model.gpt import GPT, build_model
from pentameter.model.positions import rotation
from pentameter.planning.gpt import parameter_table

T, V = 16, 40
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {
        "n_kv_heads": 2,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "tied_head": False,
        "rope_scaling": {"type": "llama3", "factor": 4.0, "original_context_length": 8},
    },
    "qwen3": {"n_kv_heads": 1, "head_size": 10, "qk_norm": "head", "norm_eps": 1e-6},
    "olmo2": {"qk_norm": "width", "norm_position": "output", "norm": "rmsnorm"},
    "gpt-neox": {"rotary_fraction": 0.5, "parallel_residual": True, "bias": True, "qkv_bias": True},
    "window": {"sliding_window": 3, "sliding_window_pattern": 2, "activation": "relu2"},
    "listed windows": {"sliding_window": 3, "sliding_window_pattern": (0, 1)},
    "nope": {"nope_layers": 2},
    "scaled": {"nope_layers": (0, 2), "attention": {"score_size": 20, "n_kv_heads": 2}},
    "gemma": {
        "norm": "rmsnorm",
        "norm_position": "both",
        "window_rope_theta": 100.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "feed_forward": {"activation": "geglu_tanh"},
        "attention": {
            "qk_norm": "head",
            "score_size": 24,
            "sliding_window": 3,
            "sliding_window_pattern": 2,
        },
    },
    "attention's biases": {"attention": {"qkv_bias": True, "out_bias": True}},
    "the others": {"bias": True, "attention": {"out_bias": False}},
    "capped": {"sliding_window": 4, "logit_softcap": 0.5, "activation": "geglu"},
}


def built(name: str, **changes: Any) -> GPT:
    sizes = {"vocab_size": V, "context_length": T, "n_layers": 3, "n_heads": 4, "d_model": 32}
    values = {**sizes, "positions": "rotary", "init_std": 0.3, **DECODERS[name], **changes}
    config = ModelConfig.model_validate(values)
    return build_model(config, 0, dtype=torch.float64).eval()


@pytest.mark.parametrize("name", DECODERS)
def test_the_table_lists_the_models_parameters(name):
    model = built(name)
    table = {spec.name: spec.shape for spec in parameter_table(model.config)}
    assert list(table) == list(model.state_dict())
    assert table == {name: tuple(p.shape) for name, p in model.state_dict().items()}


@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_gives_what_the_whole_context_gives(name):
    """In pieces of several tokens, of one, and of several again: windows reach into the cache."""
    model = built(name)
    tokens = torch.arange(2 * T).view(2, T) * 7 % V
    whole = model(tokens)
    cache = KVCache(model.config, 2, dtype=torch.float64)
    pieces = (5, 1, 1, 1, 6, 2)
    found = [model(piece, cache=cache) for piece in tokens.split(pieces, dim=1)]
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", DECODERS)
def test_no_token_sees_a_later_one(name):
    model = built(name)
    tokens = torch.arange(T)[None] * 5 % V
    changed = tokens.clone()
    changed[0, 9] += 1
    same = (model(tokens) == model(changed)).all(-1)[0]
    assert same[:9].all()
    assert not same[9:].all()


def test_a_windows_last_token_is_the_furthest_that_is_seen():
    """Of one layer: further layers see further."""
    model = built("capped", n_layers=1)
    assert model.config.window(0) == 4
    tokens = torch.arange(T)[None] * 5 % V
    changed = tokens.clone()
    changed[0, 2] += 1
    differs = (model(tokens) != model(changed)).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [2, 3, 4, 5]


def test_the_pattern_leaves_some_layers_the_whole_context():
    config = built("window").config
    assert [config.window(layer) for layer in range(3)] == [3, None, 3]


@pytest.mark.parametrize("n_shared", [1, 2, 4])
@pytest.mark.parametrize("size", [None, 1, 3, 4, 5, 16, 20])
@pytest.mark.parametrize("n_queries", [1, 3, 16])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_is_that_of_its_definition(n_shared, size, n_queries, has_sinks):
    torch.manual_seed(n_queries)
    q = torch.randn(2, 4, n_queries, 6, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(2, n_shared, T, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    query = torch.arange(T - n_queries, T)[:, None]
    key = torch.arange(T)
    seen = (key <= query) & (key > query - (size or T))
    each = [x.repeat_interleave(4 // n_shared, 1) for x in (k, v)]
    scores = (q @ each[0].mT / 6**0.5).masked_fill(~seen, float("-inf"))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if has_sinks else None
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    if sinks is not None:
        sink = sinks[:, None, None].expand(2, -1, n_queries, 1)
        scores = torch.cat((scores, sink), -1)
    expected = scores.softmax(-1)[..., :T] @ each[1]
    grads = torch.autograd.grad(expected.square().sum(), inputs)
    for form in (PLAIN_ATTENTION, attend_explicitly):
        found = form(q, k, v, Weighting(size, sinks))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        own = torch.autograd.grad(found.square().sum(), inputs)
        torch.testing.assert_close(own, grads, rtol=1e-10, atol=1e-11)


def turned(x: torch.Tensor, first: int, **changes: Any) -> torch.Tensor:
    """x (T, K) as one head's queries at positions from `first` on."""
    config = ModelConfig(
        vocab_size=V, context_length=64, n_heads=1, d_model=8, positions="rotary", **changes
    )
    turn = rotation(torch.arange(first, first + len(x)), config, x.dtype, len(x))
    assert turn is not None
    return turn(x[None, :, None])[0, :, 0]


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 5, 8, dtype=torch.float64)
    near, far = (turned(q, first) @ turned(k, first).mT for first in (0, 40))
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-5)  # angles are fp32
    assert not torch.allclose(near, q @ k.mT)


def test_a_fraction_turns_the_first_channels_only():
    x = torch.randn(5, 8, dtype=torch.float64)
    found = turned(x, 3, rotary_fraction=0.5)
    torch.testing.assert_close(found[:, 4:], x[:, 4:], rtol=0, atol=0)
    assert not torch.allclose(found[:, :4], x[:, :4])


def test_linear_scaling_divides_positions():
    x = torch.randn(1, 8, dtype=torch.float64)
    scaling = RopeScalingConfig(type="linear", factor=4.0)
    torch.testing.assert_close(turned(x, 40, rope_scaling=scaling), turned(x, 10))


def test_the_softcap_bounds_logits():
    model = built("capped")
    tokens = torch.arange(T)[None] * 5 % V
    assert model(tokens).abs().max() < 0.5
    free = built("capped", logit_softcap=None)(tokens)
    assert free.abs().max() > 0.5
    torch.testing.assert_close(model(tokens), 0.5 * torch.tanh(free / 0.5))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"n_kv_heads": 3}, "n_kv_heads=3 must divide model.attention.n_heads=4"),
        (
            {"positions": "learned", "rope_theta": 500.0},
            "rope_theta has no effect with model.positions='learned'",
        ),
        ({"head_size": 5}, "must be an even number"),
        (
            {"head_size": 100, "rotary_fraction": 0.15},
            r"is 15, which must be an even number .*nearest possible: 0\.14, 0\.16",
        ),
        ({"head_size": 100, "rotary_fraction": 0.145}, "is 14.5, which must be an even number"),
        ({"parallel_residual": True, "norm_position": "post"}, "norm_position='post'"),
        ({"sliding_window_pattern": 2}, "sliding_window is not set"),
        (
            {"sliding_window": 2, "sliding_window_pattern": (1, 6)},
            "sliding_window_pattern has layer 6, and the last of model.n_layers=6 is 5",
        ),
        ({"window_rope_theta": 10.0}, "sliding_window is not set; set it, or leave both out"),
        ({"nope_layers": (6,)}, "nope_layers has layer 6"),
        ({"positions": "learned", "nope_layers": 2}, "nope_layers has no effect with"),
        ({"attention": "latent", "nope_layers": 2}, "leave model.nope_layers out"),
        ({"n_heads": 5}, "or set model.attention.head_size"),
        (
            {"swiglu_limit": 3.0},
            "swiglu_limit has no effect with model.feed_forward.activation='gelu'",
        ),
        ({"attention": "latent", "attention_sinks": True}, "leave model.attention.sinks out"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(values, reason):
    base = {"n_heads": 4, "d_model": 32, "positions": "rotary"}
    with pytest.raises(ValueError, match=reason):
        ModelConfig(**{**base, **values})
