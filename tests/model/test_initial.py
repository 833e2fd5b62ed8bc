import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pentameter.config.schema import ModelConfig
from pentameter.model import initial
from pentameter.model.gpt import GPT, build_model
from pentameter.model.initial import BLOCK_ELEMENTS, initialize
from pentameter.planning.architecture import Init, ParameterSpec
from pentameter.planning.gpt import parameter_table


def spec(kind: str, scale: float = 1.0, n: int = 3 * BLOCK_ELEMENTS) -> ParameterSpec:
    init = Init(kind, scale)  # type: ignore[arg-type]
    return ParameterSpec("some.weight", (n,), ("embed",), init, True)


def initial_values(
    spec: ParameterSpec, seed: int, start: int = 0, stop: int | None = None
) -> torch.Tensor:
    """Flat elements [start, stop) of a parameter's initial value, fp32, by their numbers alone."""
    stop = spec.n_elements if stop is None else stop
    if spec.init.kind in initial.CONSTANTS:
        return torch.full((stop - start,), initial.CONSTANTS[spec.init.kind])
    numbers = np.arange(start, stop, dtype=np.int64)
    return torch.from_numpy(initial._drawn(spec, seed, numbers)) if len(numbers) else torch.empty(0)


GOLDEN_NORMAL = [0.00073731988, -0.0010125418, -0.0087425057]
WHOLE = {kind: initial_values(spec(kind), 1) for kind in ("normal", "uniform", "zeros", "ones")}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(WHOLE)), st.integers(0, 300), st.integers(0, 300), st.booleans())
def test_any_slice_is_a_slice_of_the_whole(kind: str, start: int, n: int, at_edge: bool) -> None:
    start += BLOCK_ELEMENTS - 150 if at_edge else 0
    values = initial_values(spec(kind), 1, start, start + n)
    assert values.dtype == torch.float32
    assert torch.equal(values, WHOLE[kind][start : start + n])


def test_golden_values() -> None:
    assert initial_values(spec("normal", 0.02), 1337, 0, 3).tolist() == pytest.approx(
        GOLDEN_NORMAL, rel=1e-6
    )


def test_normal_has_the_moments_of_a_normal() -> None:
    z = WHOLE["normal"].double()
    n = z.numel()
    assert abs(z.mean()) * math.sqrt(n) < 4
    assert abs(z.var() - 1) / math.sqrt(2 / n) < 4
    assert abs((z**3).mean()) / math.sqrt(15 / n) < 4
    assert abs((z**4).mean() - 3) / math.sqrt(96 / n) < 4
    assert abs((z[1:] * z[:-1]).mean()) * math.sqrt(n) < 4
    for bound in (0.5, 1.0, 2.0, 3.0):
        share = math.erfc(bound / math.sqrt(2))
        assert abs((z.abs() > bound).double().mean() - share) < 4 * math.sqrt(share / n)


def test_uniform_fills_its_bounds() -> None:
    u = WHOLE["uniform"].double()
    n = u.numel()
    assert -1 <= u.min() < -0.999
    assert 0.999 < u.max() <= 1
    assert abs(u.mean()) * math.sqrt(3 * n) < 4
    counts = torch.histc(u, 64, -1, 1)
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 5 * math.sqrt(2 * 63)


def test_names_seeds_and_words_are_independent() -> None:
    draws = [
        initial_values(ParameterSpec(name, (60000,), ("embed",), Init("normal", 1.0), True), seed)
        for name in ("a", "b")
        for seed in (0, 1)
    ]
    correlations = torch.corrcoef(torch.stack(draws))[tuple(torch.triu_indices(4, 4, 1))]
    assert correlations.abs().max() * math.sqrt(60000) < 4


def test_an_index_beyond_32_bits_has_its_own_values() -> None:
    huge = spec("normal", n=2**33)
    below, above = (initial_values(huge, 1, start, start + 9) for start in (0, 2**32))
    assert not torch.equal(below, above)
    across = initial_values(huge, 1, 2**32 - 4, 2**32 + 9)
    assert torch.equal(across[4:], above)


def test_a_model_gets_the_tables_values_in_any_dtype() -> None:
    config = ModelConfig(
        vocab_size=11, context_length=8, n_layers=2, n_heads=2, d_model=8, bias=True, qkv_bias=True
    )
    for dtype in (torch.float32, torch.float64):
        state = build_model(config, seed=3, dtype=dtype).state_dict()
        for row in parameter_table(config):
            expected = initial_values(row, 3).view(row.shape).to(dtype)
            assert torch.equal(state[row.name], expected)


def test_a_model_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(vocab_size=11, context_length=8, n_layers=1, n_heads=2, d_model=8)
    whole = build_model(config, seed=3)
    monkeypatch.setattr("pentameter.model.initial.CHUNK_ELEMENTS", 37)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    initialize(model, config, 3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name])


def test_weights_of_a_gpt2_have_their_deviations() -> None:
    config = ModelConfig(
        vocab_size=500,
        context_length=64,
        n_layers=4,
        n_heads=4,
        d_model=128,
        residual_init_scale=True,
    )
    state = build_model(config, seed=0).state_dict()
    for name, deviation in (
        ("token_embedding.weight", 0.02),
        ("blocks.2.attention.qkv.weight", 0.02),
        ("blocks.2.attention.out.weight", 0.02 * 8**-0.5),
        ("blocks.3.mlp.down.weight", 0.02 * 8**-0.5),
    ):
        n = state[name].numel()
        assert abs(state[name].std().item() / deviation - 1) < 4 / math.sqrt(2 * n)


@pytest.mark.parametrize(
    ("shape", "region"),
    [
        ((6, 8, 10), ((2, 5), (0, 8), (0, 10))),
        ((6, 8, 10), ((1, 6), (3, 5), (0, 10))),
        ((6, 8, 10), ((0, 2), (2, 8), (4, 5))),
        ((9, 12), ((0, 9), (3, 7))),
        ((100,), ((17, 90),)),
    ],
)
@pytest.mark.parametrize("sizes", [(2**16, 2**22), (7, 31)])
def test_a_slice_draws_its_own_numbers_only(shape, region, sizes, monkeypatch) -> None:
    for name, size in zip(("BLOCK_ELEMENTS", "CHUNK_ELEMENTS"), sizes, strict=True):
        monkeypatch.setattr(f"pentameter.model.initial.{name}", size)
    drawn = []
    counted = initial.bits
    monkeypatch.setattr(
        initial, "bits", lambda key, index: drawn.append(index.size) or counted(key, index)
    )
    row = ParameterSpec("w", shape, ("embed",) * len(shape), Init("uniform", 1.0), True)
    places = tuple(slice(*side) for side in region)
    own = torch.empty(shape)[places].contiguous()
    initial.fill(row, own, region, 3)
    assert sum(drawn) == own.numel()
    assert max(drawn) <= sizes[0]
    assert torch.equal(own, initial_values(row, 3).view(shape)[places])
