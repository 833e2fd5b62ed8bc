"""YaRN's rotary positions, read from config.json and written to it, held against `transformers`."""

from __future__ import annotations

import pytest
import torch
from their_models import transformers

from pentameter.checkpoint.hugging_face.rotary_rules import rotary_rule
from pentameter.config.model.architecture import ModelConfig
from pentameter.model.positions import rotation

WHOLE_HEADS_TURN, PART_OF_A_HEAD_TURNS = rotary_rule(), rotary_rule(partly=True)
LATENT_HEADS_TURN = rotary_rule(scales_scores=True)
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "original_max_position_embeddings": 64}
OF_GPT_OSS = {**YARN, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
OF_DEEPSEEK = {**YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
SETTINGS = [
    OF_GPT_OSS,
    OF_DEEPSEEK,
    {**YARN, "factor": 4.0},
    {**YARN, "factor": 4.0, "attention_factor": 1.25, "beta_slow": None},
    {**YARN, "factor": 8.0, "beta_fast": 3.0, "beta_slow": 0.25, "mscale": 0.5},
    {**YARN, "factor": 8.0, "mscale": 0.5, "mscale_all_dim": 1.5},
    {**YARN, "factor": 8.0, "mscale_all_dim": 1.5},
    {**YARN, "factor": 0.5, "original_max_position_embeddings": 3},  # both ends at channel 0
]


def model_of(settings, rule, **changes) -> ModelConfig:
    """The model that a rule reads from config.json's `rope_parameters`."""
    read = rule.read({"rope_parameters": settings}, {"context_length": 2048})
    values = {"n_heads": 2, "head_size": 24, "d_model": 32, "positions": "rotary", **changes}
    return ModelConfig.model_validate({"context_length": 2048, **values, **read})


def theirs(settings, head_size: int):
    """Cosines and sines (T, R / 2) as `transformers` computes them, and its factor of scores."""
    config = transformers.LlamaConfig(
        head_dim=head_size, max_position_embeddings=2048, rope_parameters={**settings}
    )
    yarn = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    frequencies, factor = yarn(config)
    angles = torch.arange(2048.0)[:, None] * frequencies
    apply_mscale = transformers.models.deepseek_v3.modeling_deepseek_v3.yarn_apply_mscale
    return angles.cos() * factor, angles.sin() * factor, apply_mscale(settings, 1.0)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("rule", "head_size", "changes"),
    [
        (WHOLE_HEADS_TURN, 24, {}),
        (LATENT_HEADS_TURN, 12, {"attention": "latent", "rope_head_size": 12}),
        (PART_OF_A_HEAD_TURNS, 24, {}),
    ],
    ids=["whole", "latent", "part"],
)
def test_yarns_angles_are_those_of_transformers_to_the_bit(settings, rule, head_size, changes):
    if rule is PART_OF_A_HEAD_TURNS:
        settings = {**settings, "partial_rotary_factor": 0.5}
    model = model_of(settings, rule, **changes)
    written = rule.write(model)["rope_parameters"]
    assert model_of(written, rule, **changes) == model
    found = rotation(torch.arange(2048), model, torch.float32, 2048)
    assert found is not None
    for given in (settings, written):
        cosine, sine, score_factor = theirs(given, head_size)
        assert torch.equal(found.cosine, cosine)
        assert torch.equal(found.sine, sine)
        is_latent = rule is LATENT_HEADS_TURN
        assert model.rope_scaling.score_factor == (score_factor if is_latent else 1.0)


def test_mscale_without_the_other_is_written_as_the_factor_that_it_makes():
    scaling = {"type": "yarn", "factor": 8.0, "mscale": 0.5}
    model = ModelConfig(positions="rotary", d_model=32, n_heads=2, rope_scaling=scaling)
    written = WHOLE_HEADS_TURN.write(model)["rope_parameters"]
    assert "mscale" not in written
    assert written["attention_factor"] == model.rope_scaling.rotation_factor


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"type": "linear", "beta_fast": 8.0}, "beta_fast has no effect .*type='linear'"),
        ({"truncate": False}, "truncate has no effect .*type='none'"),
        ({"type": "yarn", "beta_slow": 32.0}, "beta_slow=32.0 must be below"),
        ({"type": "yarn", "mscale": 2.0, "attention_factor": 1.0}, "mscale=2.0 is for computing"),
        ({"type": "yarn", "mscale_all_dim": 1.0}, "mscale_all_dim=1.0 is of latent attention"),
    ],
)
def test_a_setting_of_yarn_that_makes_no_sense_is_refused_with_the_reason(scaling, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig(positions="rotary", d_model=32, n_heads=2, rope_scaling=scaling)
