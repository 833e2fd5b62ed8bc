"""The fused step is the plain model: loss and every gradient, in fp64, over the variants.

Compiling a variant takes a minute, and says nothing of the formulas. So every variant runs with
kernels as they are written, and one that has all of them with compiled ones; the long tier
compiles each.
"""

import contextlib

import pytest
import torch

from pentameter.config.schema import ModelConfig
from pentameter.fused_cpu import kernels as kernels_module
from pentameter.fused_cpu.step import fused_loss_sum
from pentameter.fused_cpu.vector import linear
from pentameter.model.compiled import plainly
from pentameter.model.dropout import dropout_keys
from pentameter.model.gpt import build_model
from pentameter.model.loss import loss_sum
from pentameter.planning.fused_step import architecture_obstacle

BASE = {
    "vocab_size": 13,
    "context_length": 12,
    "n_layers": 2,
    "n_heads": 2,
    "d_model": 16,
    "dropout": 0.2,
    "attention_dropout": 0.1,
}
VARIANTS = {
    "nanogpt": {"attention_dropout": 0.0},
    "tutorial": {
        "activation": "relu",
        "tied_head": False,
        "head_bias": True,
        "bias": True,
        "embedding_dropout": 0.0,
    },
    "gpt2": {"activation": "gelu_tanh", "bias": True, "qkv_bias": True, "vocab_multiple": 8},
    "other": {
        "norm": "rmsnorm",
        "positions": "sinusoidal",
        "embedding_scale": True,
        "dropout": 0.0,
        "head_bias": True,
    },
    "llama": {
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "positions": "rotary",
        "n_heads": 4,
        "n_kv_heads": 2,
        "activation": "swiglu",
        "d_ff": 24,
        "tied_head": False,
    },
    "qwen": {
        "norm": "rmsnorm",
        "positions": "rotary",
        "rotary_fraction": 0.5,
        "n_heads": 3,
        "n_kv_heads": 1,
        "head_size": 8,
        "qk_norm": "head",
        "qkv_bias": True,
        "activation": "geglu",
        "bias": True,
        "logit_softcap": 3.0,
    },
    "biases of attention alone": {"attention": {"qkv_bias": True, "out_bias": True}},
    "shared, width": {
        "n_heads": 4,
        "n_kv_heads": 2,
        "qk_norm": "width",
        "positions": "rotary",
        "activation": "relu2",
    },
    "fast": {"norm": "rmsnorm", "qk_norm": "head", "positions": "rotary", "activation": "relu2"},
    "experts": {"n_experts": 4, "d_expert": 8, "balance": "bias"},
    "experts with gates, biases and shared ones": {
        "bias": True,
        "activation": "swiglu",
        "d_ff": 24,
        "n_experts": 5,
        "experts_per_token": 3,
        "n_shared_experts": 2,
        "shared_expert_gate": True,
        "router_bias": True,
        "router_top_k_first": True,
        "dense_layers": 1,
    },
    "experts in groups, with losses of their own": {
        "norm": "rmsnorm",
        "n_experts": 8,
        "n_shared_experts": 1,
        "router": "sigmoid",
        "router_groups": 4,
        "router_open_groups": 2,
        "router_renormalize": True,
        "router_scale": 2.5,
        "router_z_loss": 0.1,
        "balance": "sequence",
        "balance_weight": 0.5,
    },
    "experts that are full, and one without a token": {
        "n_experts": 6,
        "expert_capacity": 0.5,
        "balance": "batch",
    },
}


def batch(rows=6, time=12):
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(13, (rows, time), generator=generator)
    targets = torch.randint(13, (rows, time), generator=generator)
    targets[0, 5:] = -1
    return tokens, targets


def randomised(config, dtype):
    """A model whose biases and norm weights are not what initialisation leaves, 0 and 1."""
    model = build_model(config, 7, dtype=dtype)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=generator, dtype=dtype), alpha=0.1
            )
    return model.train()


def losses_and_gradients(config, dtype, time=12):
    tokens, targets = batch(time=time)
    keys = dropout_keys(config, 3, 5, range(len(tokens)))
    answers = []
    for fused in (False, True):
        model = randomised(config, dtype)
        if fused:
            loss = fused_loss_sum(model, tokens, targets, keys, dtype)
        else:
            loss = loss_sum(model(tokens, dropout_keys=keys), targets, config.vocab_size)
        loss.backward()
        trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        answers.append((loss.item(), trained))
    return answers


def assert_fused_equals_plain(config, time):
    (plain_loss, plain), (loss, fused) = losses_and_gradients(config, torch.float64, time)
    assert loss == pytest.approx(plain_loss, rel=1e-13)
    assert fused.keys() == plain.keys()
    for name, gradient in plain.items():
        # Sums of a few hundred terms in another order: some ulps of the largest element.
        scale = gradient.abs().max().item()
        torch.testing.assert_close(fused[name], gradient, rtol=1e-10, atol=1e-12 * scale, msg=name)


@pytest.fixture(params=["as written", pytest.param("compiled", marks=pytest.mark.slow)])
def kernels(request):
    with torch.compiler.set_stance("default" if request.param == "compiled" else "force_eager"):
        yield request.param


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_equals_plain_in_fp64(kernels, variant):
    config = ModelConfig(**{**BASE, **VARIANTS[variant]})
    assert architecture_obstacle(config) is None
    for time in (12, 7):  # 7 does not divide into blocks, and is shorter than the context
        assert_fused_equals_plain(config, time)


def test_compiled_kernels_equal_plain_in_fp64():
    """All kernels at once: norms that subtract the mean, heads with norms, biases and rotations."""
    config = ModelConfig(**{**BASE, **VARIANTS["qwen"], "norm": "layernorm", "vocab_multiple": 8})
    assert_fused_equals_plain(config, 12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_large_vocabularys_loss_comes_by_chunks(monkeypatch, kernels, variant):
    monkeypatch.setattr("pentameter.model.loss.MAX_LOGITS", 7 * 16)
    assert_fused_equals_plain(ModelConfig(**{**BASE, **VARIANTS[variant]}), 12)


MICRO_BATCHES = pytest.mark.parametrize("variant", ["nanogpt", "qwen", "experts"])


def gradients_of_micro_batches(variant, parameters, products, step, micro_batch):
    """The gradients after three micro-batches within `step`, with matmuls in `products`; each is
    computed within `micro_batch`, which is told whether more follow."""
    config = ModelConfig(**{**BASE, **VARIANTS[variant]})
    tokens, targets = batch()
    keys = dropout_keys(config, 3, 5, range(len(tokens)))
    model = randomised(config, parameters)
    with plainly(), step:
        for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
            given = tokens[rows], targets[rows], keys[rows]
            with micro_batch(rows.stop < len(tokens)):
                fused_loss_sum(model, *given, products).backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


def counting(monkeypatch, name):
    """A list that grows by one at each call of a function of `linear`."""
    function, calls = getattr(linear, name), []
    monkeypatch.setattr(linear, name, lambda *given: calls.append(given) or function(*given))
    return calls


@MICRO_BATCHES
def test_micro_batches_share_what_is_folded_of_the_weights(monkeypatch, variant):
    folded = counting(monkeypatch, "_fold")
    gradients, counts = [], []
    for context in (contextlib.nullcontext(), linear.folding_once()):
        given = torch.float32, torch.bfloat16, context, contextlib.nullcontext
        gradients.append(gradients_of_micro_batches(variant, *given))
        counts.append(len(folded))
        folded.clear()
    assert counts == [3 * counts[1], counts[1]]
    assert counts[1] > 0
    for anew, kept in zip(*gradients, strict=True):
        assert torch.equal(anew, kept)


@MICRO_BATCHES
def test_micro_batches_gradients_are_unfolded_once(monkeypatch, variant):
    unfolded = counting(monkeypatch, "_unfold")
    gradients, counts = [], []
    for micro_batch in (contextlib.nullcontext, linear.unfolding_later):
        given = torch.float64, torch.float64, linear.folding_once(), micro_batch
        gradients.append(gradients_of_micro_batches(variant, *given))
        counts.append(len(unfolded))
        unfolded.clear()
    assert counts == [3 * counts[1], counts[1]]
    assert counts[1] > 0
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


def test_rounded_gradients_of_micro_batches_add_up_in_fp32():
    weights, scale = (torch.randn(3, 16), torch.randn(2, 16)), torch.randn(16)
    rounded = [torch.randn(5, 16).bfloat16() for _ in range(3)]
    with plainly(), linear.folding_once():
        for g in rounded[:2]:
            with linear.unfolding_later(True):
                assert linear.unfold(g, weights, scale) == ([None, None], None)
        with linear.unfolding_later(False):
            found = linear.unfold(rounded[2], weights, scale)
        first, second, third = (g.float() for g in rounded)
        expected = linear.unfold(first + second + third, weights, scale)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_gradients_that_no_micro_batch_got_are_not_lost_silently():
    with (
        pytest.raises(AssertionError, match="left out weights"),
        linear.folding_once(),
        linear.unfolding_later(True),
    ):
        linear.unfold(torch.ones(2, 3), (torch.ones(2, 3),), None)


def test_weights_are_folded_again_after_the_step():
    weight = torch.ones(2, 3)
    with plainly():
        for value in (1.0, 2.0):
            weight.fill_(value)
            with linear.folding_once():
                low = linear.fold((weight,), None, torch.bfloat16)
            assert torch.equal(low, weight.bfloat16())


@pytest.mark.slow
def test_many_shapes_in_one_process():
    """PyTorch gives up on a function after eight recompilations; a sweep has more than that."""
    for width in range(1, 13):
        x = torch.randn(4, width)
        assert torch.equal(kernels_module.transpose(x), x.t())


def test_norms_after_the_sum_are_left_to_the_plain_model():
    config = ModelConfig(**{**BASE, "norm_position": "post"})
    assert architecture_obstacle(config) == "model.norm_position='post'"
