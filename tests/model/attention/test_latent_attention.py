"""Latent attention computes what its definition says, with and without a cache of latents."""

import pytest
import torch

from pentameter.config.schema import LoraConfig, ModelConfig
from pentameter.model.attention import latent_attention
from pentameter.model.attention.cache import KVCache
from pentameter.model.attention.dot_product import DotProductAttention
from pentameter.model.attention.latent_attention import LatentAttention
from pentameter.model.gpt import build_model
from pentameter.model.matmul import PLAIN
from pentameter.model.positions import Positions, rotations
from pentameter.parallel.linear import install_forwards
from pentameter.parallel.sources.adapters import add_adapters

B, T, D, H, K, R, V, C = 2, 9, 20, 2, 6, 4, 5, 7


def config(**changes) -> ModelConfig:
    return ModelConfig(
        vocab_size=19,
        context_length=T,
        n_layers=2,
        n_heads=H,
        d_model=D,
        head_size=K,
        attention="latent",
        kv_rank=C,
        rope_head_size=R,
        v_head_size=V,
        positions="rotary",
        init_std=0.4,
        **changes,
    )


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: torch.Tensor, t: int) -> torch.Tensor:
    """A vector (R,) at position t, pair by pair."""
    y = torch.empty_like(x)
    for i in range(R // 2):
        angle = t * (1.0 / 10000.0 ** torch.tensor(2 * i / R))  # in float32, as the model's
        cosine, sine = angle.cos().double(), angle.sin().double()
        a, b = x[i], x[i + R // 2]
        y[i], y[i + R // 2] = a * cosine - b * sine, b * cosine + a * sine
    return y


def by_definition(layer: LatentAttention, x: torch.Tensor) -> torch.Tensor:
    """One sequence (T, D), a query and a head at a time."""
    down = x @ layer.kv_down.weight.T
    latent, shared = rms(down[:, :C], layer.kv_norm.weight), down[:, C:]
    q_input = x
    if layer.q_down is not None:
        q_input = rms(x @ layer.q_down.weight.T, layer.q_norm.weight)
    q = (q_input @ layer.q.weight.T).view(T, H, K + R)
    kv = (latent @ layer.kv.weight.T).view(T, H, K + V)
    means = torch.zeros(T, H, V, dtype=x.dtype)
    for t in range(T):
        for h in range(H):
            query = torch.cat([q[t, h, :K], turned(q[t, h, K:], t)])
            keys = [torch.cat([kv[s, h, :K], turned(shared[s], s)]) for s in range(t + 1)]
            weights = torch.stack([query @ key / (K + R) ** 0.5 for key in keys]).softmax(0)
            means[t, h] = weights @ kv[: t + 1, h, K:]
    return means.flatten(1) @ layer.out.weight.T


@pytest.mark.parametrize(("q_rank", "pads"), [(None, True), (3, True), (3, False)])
def test_it_is_the_definition(monkeypatch, q_rank, pads):
    monkeypatch.setattr(latent_attention, "wants_equal_widths", lambda *_: pads)
    widths = []

    class Attention(DotProductAttention):
        def __call__(self, q, k, v, how):
            widths.append(v.shape[-1])
            return super().__call__(q, k, v, how)

    model = build_model(config(q_rank=q_rank), 1, dtype=torch.float64)
    layer = model.blocks["0"].latent_attention
    with torch.no_grad():
        for norm in [layer.kv_norm, *([layer.q_norm] if q_rank else [])]:
            norm.weight.uniform_(0.5, 2, generator=torch.Generator().manual_seed(1))
        x = torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        numbers = torch.arange(T)
        rotary = rotations(numbers, model.config, x.dtype, T)
        positions = Positions(numbers, numbers, rotary)
        layer.attend = Attention()
        y = layer(x, positions)
        assert widths == [K + R if pads else V]
        for row in range(B):
            torch.testing.assert_close(y[row], by_definition(layer, x[row]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": 3}, {"attention_dropout": 0.5}], ids=str
)
def test_values_that_are_not_padded_give_the_same_result(monkeypatch, changes):
    model = build_model(config(**changes), 1, dtype=torch.float64)
    tokens = torch.arange(B * T).view(B, T) % 19
    keys = torch.arange(B * 2 * 8, dtype=torch.int32).view(B, 8, 2)

    def results():
        model.zero_grad()
        y = model(tokens, dropout_keys=keys if changes.get("attention_dropout") else None)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters())]

    padded = results()
    monkeypatch.setattr(latent_attention, "wants_equal_widths", lambda *_: False)
    for before, after in zip(padded, results(), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, {"q_rank": 3, "sliding_window": 4}])
@pytest.mark.parametrize("pieces", [(T,), (4, 5), (1,) * T])
def test_cached_latents_give_the_same_text(pieces, changes):
    model = build_model(config(**changes), 1, dtype=torch.float64).eval()
    tokens = torch.arange(B * T).view(B, T) % 19
    cache = KVCache(model.config, B, dtype=torch.float64)
    assert cache.keys[0].shape == (B, 1, T, C)
    assert cache.values[0].shape == (B, 1, T, R)
    with torch.no_grad():
        found = torch.cat([model(each, cache=cache) for each in tokens.split(pieces, 1)], 1)
        torch.testing.assert_close(found, model(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("q_rank", [None, 3])
def test_a_cache_sees_the_adapters_of_every_layer(q_rank):
    """Attention over cached latents multiplies by the matrices of `kv` without calling it."""
    model = build_model(config(q_rank=q_rank), 1, dtype=torch.float64).eval()
    tokens = torch.arange(B * T).view(B, T) % 19
    paths = [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    with torch.no_grad():
        plain = model(tokens)
    add_adapters(model, [path for path in paths if "blocks." in path], LoraConfig(rank=2))
    for name, each in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(each, std=0.5, generator=torch.Generator().manual_seed(3))
    install_forwards(model, PLAIN, {})
    cache = KVCache(model.config, B, dtype=torch.float64)
    with torch.no_grad():
        whole = model(tokens)
        pieces = []
        for part in tokens.split((4, 1, 4), 1):
            pieces.append(model(part, cache=cache))
    assert not torch.allclose(whole, plain)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-11)
