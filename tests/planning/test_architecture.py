import subprocess
import sys

import pytest

from pentameter.config.schema import ModelConfig
from pentameter.errors import ConfigError
from pentameter.planning.architecture import Init
from pentameter.planning.gpt import parameter_table

SHAKESPEARE_TUTORIAL = ModelConfig(
    vocab_size=65,
    context_length=256,
    n_layers=6,
    n_heads=6,
    d_model=384,
    activation="relu",
    bias=True,
    tied_head=False,
    head_bias=True,
)
GPT2 = ModelConfig(
    vocab_size=50257,
    context_length=1024,
    n_layers=12,
    n_heads=12,
    d_model=768,
    activation="gelu_tanh",
    bias=True,
    qkv_bias=True,
    residual_init_scale=True,
)
WIKITEXT2_TUTORIAL = ModelConfig(
    vocab_size=28782,
    n_layers=8,
    n_heads=16,
    d_model=4096,
    d_ff=4096,
    activation="relu",
    norm_position="post",
    positions="sinusoidal",
    bias=True,
    qkv_bias=True,
    tied_head=False,
    head_bias=True,
    init="uniform",
    embedding_scale=True,
)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (SHAKESPEARE_TUTORIAL, 10_788_929),
        (GPT2, 124_439_808),
        (GPT2.updated({"attention.qkv_bias": False}), 124_412_160),
        (GPT2.updated({"attention.qkv_bias": False, "tied_head": False}), 163_009_536),
        (GPT2.updated({"vocab_multiple": 128}), 124_475_904),
        (
            GPT2.updated(
                {"vocab_size": 50304, "n_layers": 48, "attention.n_heads": 32, "d_model": 1600}
            ),
            1_557_686_400,
        ),
        (
            GPT2.updated(
                {
                    "vocab_size": 50304,
                    "context_length": 2048,
                    "n_layers": 96,
                    "attention.n_heads": 96,
                    "d_model": 12288,
                }
            ),
            174_604_836_864,
        ),
        (WIKITEXT2_TUTORIAL, 1_041_444_974),
    ],
)
def test_published_models_have_exactly_their_parameters(model: ModelConfig, count: int) -> None:
    assert sum(spec.n_elements for spec in parameter_table(model)) == count


def test_vocabulary_is_padded_up_to_the_multiple() -> None:
    assert GPT2.updated({"vocab_multiple": 128}).padded_vocab_size == 50304
    assert GPT2.updated({"vocab_size": 50304, "vocab_multiple": 128}).padded_vocab_size == 50304
    assert GPT2.padded_vocab_size == 50257


def test_an_unknown_vocabulary_is_refused_with_its_remedy() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        parameter_table(GPT2.updated({"vocab_size": None}))


@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 3), (5, 4), (-1, 2), (0, 13)])
def test_a_layer_range_outside_the_model_is_refused(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="n_layers=12"):
        parameter_table(GPT2, first_layer=first, last_layer=last)


@pytest.mark.parametrize("tied", [True, False])
def test_slices_cover_the_table_and_share_only_a_tied_embedding(tied: bool) -> None:
    model = SHAKESPEARE_TUTORIAL.updated({"tied_head": tied})
    slices = [
        parameter_table(model, first_layer=first, last_layer=last)
        for first, last in ((0, 2), (2, 3), (3, 6))
    ]
    assert set().union(*slices) == set(parameter_table(model))
    n_shared = sum(map(len, slices)) - len(parameter_table(model))
    assert n_shared == (1 if tied else 0)
    assert ("token_embedding.weight" in {spec.name for spec in slices[-1]}) == tied


def test_every_row_of_the_table_is_consistent() -> None:
    for model in (SHAKESPEARE_TUTORIAL, GPT2, WIKITEXT2_TUTORIAL):
        table = parameter_table(model)
        assert len({spec.name for spec in table}) == len(table)
        for spec in table:
            assert len(spec.axes) == len(spec.shape)
            assert spec.decay == (len(spec.shape) == 2)
            assert (spec.layer is not None) == spec.name.startswith("blocks.")
            if spec.name.endswith("bias"):
                assert spec.init == Init("zeros")


def test_residual_projections_start_smaller_when_asked() -> None:
    init = {spec.name: spec.init for spec in parameter_table(GPT2)}
    assert init["blocks.3.mlp.up.weight"] == Init("normal", 0.02)
    assert init["blocks.3.mlp.down.weight"] == Init("normal", 0.02 * 24**-0.5)
    assert init["blocks.0.attention.out.weight"] == Init("normal", 0.02 * 24**-0.5)
    assert init["final_norm.weight"] == Init("ones")


def test_uniform_bounds_follow_pytorchs_encoder() -> None:
    init = {spec.name: spec.init for spec in parameter_table(WIKITEXT2_TUTORIAL)}
    assert init["token_embedding.weight"] == init["head.weight"] == Init("uniform", 0.1)
    assert init["blocks.0.mlp.up.weight"] == Init("uniform", 4096**-0.5)
    assert init["blocks.0.attention.qkv.weight"].scale == pytest.approx((6 / (4 * 4096)) ** 0.5)


def test_the_table_needs_no_torch() -> None:
    code = "import pentameter.planning.architecture, sys; raise SystemExit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
