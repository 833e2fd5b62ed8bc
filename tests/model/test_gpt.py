import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pentameter.config.schema import ModelConfig
from pentameter.model.attention.cache import KVCache
from pentameter.model.dropout import dropout_keys
from pentameter.model.gpt import GPT, build_model
from pentameter.model.loss import loss_sum
from pentameter.model.positions import sinusoidal_positions
from pentameter.planning.gpt import parameter_table


def tiny(**changes: object) -> ModelConfig:
    values = {
        "vocab_size": 13,
        "context_length": 12,
        "n_layers": 3,
        "n_heads": 2,
        "d_model": 8,
        "bias": True,
        **changes,
    }
    return ModelConfig(**values)


def tokens(config: ModelConfig, batch_size: int = 3, length: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (batch_size, length or config.context_length)
    return torch.randint(0, config.vocab_size or 0, shape, generator=generator)


VARIANTS = [
    tiny(),
    tiny(
        tied_head=False,
        head_bias=True,
        qkv_bias=True,
        activation="relu",
        norm_position="post",
        positions="sinusoidal",
        embedding_scale=True,
        init="uniform",
    ),
    tiny(norm="rmsnorm", bias=False, head_bias=True, vocab_multiple=8, d_ff=20),
]

configs = st.builds(
    tiny,
    vocab_multiple=st.sampled_from([1, 8]),
    n_layers=st.integers(1, 3),
    d_ff=st.sampled_from([None, 12]),
    activation=st.sampled_from(["relu", "gelu", "gelu_tanh"]),
    norm=st.sampled_from(["layernorm", "rmsnorm"]),
    norm_position=st.sampled_from(["pre", "post"]),
    positions=st.sampled_from(["learned", "sinusoidal"]),
    tied_head=st.booleans(),
    head_bias=st.booleans(),
    qkv_bias=st.booleans(),
    bias=st.booleans(),
    init=st.sampled_from(["normal", "uniform"]),
    residual_init_scale=st.booleans(),
    embedding_scale=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(configs, st.data())
def test_the_table_is_the_state_dict(config: ModelConfig, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, config.n_layers - 1))
    last = data.draw(st.integers(first + 1, config.n_layers))
    with torch.device("meta"):
        whole, part = GPT(config), GPT(config, first_layer=first, last_layer=last)
    for model, table in (
        (whole, parameter_table(config)),
        (part, parameter_table(config, first_layer=first, last_layer=last)),
    ):
        built = [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
        assert built == [(spec.name, spec.shape) for spec in table]
        assert not list(model.buffers())


@pytest.mark.parametrize("config", VARIANTS, ids=["gpt", "post_norm", "rmsnorm"])
@pytest.mark.parametrize("cuts", [(0, 1, 3), (0, 2, 3), (0, 1, 2, 3)])
def test_slices_composed_are_the_whole_with_dropout_on(
    config: ModelConfig, cuts: tuple[int, ...]
) -> None:
    config = config.updated({"dropout": 0.3, "attention.dropout": 0.2})
    keys = dropout_keys(config, seed=1, step=7, rows=[0, 1, 2])
    whole = build_model(config, seed=4)
    expected = whole(tokens(config), dropout_keys=keys)
    x = tokens(config)
    for first, last in itertools.pairwise(cuts):
        part = build_model(config, seed=4, first_layer=first, last_layer=last)
        for name, value in part.state_dict().items():
            assert torch.equal(value, whole.state_dict()[name])
        x = part(x, dropout_keys=keys)
    assert torch.equal(x, expected)
    assert not torch.equal(whole(tokens(config)), expected)


@pytest.mark.parametrize("config", VARIANTS, ids=["gpt", "post_norm", "rmsnorm"])
@pytest.mark.parametrize("attention_dropout", [0.0, 0.2])
def test_a_future_token_never_changes_an_earlier_logit(
    config: ModelConfig, attention_dropout: float
) -> None:
    config = config.updated({"attention.dropout": attention_dropout})
    model = build_model(config, seed=0, dtype=torch.float64)
    keys = dropout_keys(config, 0, 0, [0, 1])
    x = tokens(config, 2)
    before = model(x, dropout_keys=keys)
    for changed in range(1, config.context_length):
        y = x.clone()
        y[:, changed] = (y[:, changed] + 1) % (config.vocab_size or 0)
        after = model(y, dropout_keys=keys)
        torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=1e-14)
        assert (after[:, changed] - before[:, changed]).abs().max() > 1e-4


@pytest.mark.parametrize("config", VARIANTS, ids=["gpt", "post_norm", "rmsnorm"])
@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 1, 1, 4], [4, 4, 4], [12]])
def test_cached_logits_are_those_of_the_whole_context(
    config: ModelConfig, pieces: list[int]
) -> None:
    # fp32: sums of a few dozen terms of order 1 in another order. fp64: the same, 2^-29 smaller.
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        model = build_model(config, seed=2, dtype=dtype).eval()
        cache = KVCache(config, 3, dtype=dtype)
        x = tokens(config)
        with torch.inference_mode():
            expected = model(x)
            for _ in range(2):  # again after a reset
                parts = [model(part, cache=cache) for part in x.split(pieces, dim=1)]
                torch.testing.assert_close(
                    torch.cat(parts, dim=1), expected, rtol=tolerance, atol=tolerance
                )
                assert cache.length == 12
                cache.reset()
                assert cache.length == 0


def test_a_context_too_long_is_refused() -> None:
    config = tiny()
    model = build_model(config, seed=0)
    with pytest.raises(ValueError, match="context_length=12"):
        model(torch.zeros(1, 13, dtype=torch.int64))
    cache = KVCache(config, 1)
    model(tokens(config, 1, 10), cache=cache)
    with pytest.raises(ValueError, match="10 cached and 3 new"):
        model(tokens(config, 1, 3), cache=cache)


def test_dropout_and_a_cache_exclude_each_other() -> None:
    config = tiny(dropout=0.1)
    model = build_model(config, seed=0)
    with pytest.raises(ValueError, match="exclude"):
        model(
            tokens(config, 1),
            dropout_keys=dropout_keys(config, 0, 0, [0]),
            cache=KVCache(config, 1),
        )


def test_untrained_loss_is_that_of_a_uniform_guess() -> None:
    config = ModelConfig(
        vocab_size=65, activation="relu", bias=True, tied_head=False, head_bias=True
    )  # the published tutorial's size: 6 layers, 6 heads, 384 wide, 256 tokens
    x = tokens(config, 4)
    losses = []
    for seed in range(4):
        model = build_model(config, seed)
        assert sum(p.numel() for p in model.parameters()) == 10_788_929
        with torch.inference_mode():
            losses.append(loss_sum(model(x), x.roll(-1, dims=1), 65).item() / x.numel())
    # Logits of variance d_model · init_std² = 0.154 cost half of that over ln 65.
    assert abs(sum(losses) / 4 - math.log(65)) < 0.1


def test_building_uses_no_random_generator() -> None:
    state = torch.get_rng_state()
    build_model(tiny(), seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_padded_rows_change_no_logit_of_the_vocabulary() -> None:
    plain, padded = tiny(), tiny(vocab_multiple=8)
    assert padded.padded_vocab_size == 16
    x = tokens(plain)
    logits = build_model(padded, seed=3)(x)
    assert logits.shape == (3, 12, 16)
    torch.testing.assert_close(logits[..., :13], build_model(plain, seed=3)(x))


def test_sinusoidal_positions_are_the_papers() -> None:
    table = sinusoidal_positions(torch.arange(7), 6, torch.float64)
    for position in range(7):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


@pytest.mark.parametrize("config", VARIANTS, ids=["gpt", "post_norm", "rmsnorm"])
def test_tokens_at_any_positions_embed_as_in_the_whole(config: ModelConfig) -> None:
    model = build_model(config, seed=1)
    x = tokens(config)
    whole = model.embed(x, torch.arange(12))
    for positions in (torch.arange(5, 12), torch.tensor([0, 1, 10, 11])):
        assert torch.equal(model.embed(x[:, positions], positions), whole[:, positions])


def test_the_default_positions_are_those_from_0_on() -> None:
    config = tiny(dropout=0.2, attention_dropout=0.2)
    model = build_model(config, seed=1)
    x, keys = tokens(config), dropout_keys(config, 0, 0, [0, 1, 2])
    given = model(x, dropout_keys=keys, positions=torch.arange(12))
    assert torch.equal(given, model(x, dropout_keys=keys))
    later = model(x[:, :6], dropout_keys=keys, positions=torch.arange(6, 12))
    assert not torch.equal(later, model(x[:, :6], dropout_keys=keys))


def test_bf16_autocast_keeps_the_model_whole() -> None:
    config = tiny(dropout=0.1, attention_dropout=0.1)
    model = build_model(config, seed=1)
    keys = dropout_keys(config, 0, 0, [0, 1, 2])
    x = tokens(config)
    exact = model(x, dropout_keys=keys)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(x, dropout_keys=keys)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.01)


@pytest.mark.slow
def test_compiled_training_is_eager_training() -> None:
    """In the quick tier: test_assemble.py, and the compiled kernels with all dropout of
    test_fused.py."""
    config = tiny(n_layers=1, dropout=0.2, attention_dropout=0.2, vocab_multiple=8)
    model = build_model(config, seed=1)
    x = tokens(config)

    def loss(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return loss_sum(model(x, dropout_keys=keys), x.roll(-1, dims=1), 13)

    compiled = torch.compile(loss, dynamic=False, fullgraph=True)
    for step in range(2):
        keys = dropout_keys(config, 0, step, [0, 1, 2])
        results = []
        for function in (loss, compiled):
            model.zero_grad()
            value = function(x, keys)
            value.backward()
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            results.append((value.detach(), gradients))
        # A mask that differed in one element would differ by far more than rounding.
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
