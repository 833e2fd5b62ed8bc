"""Rotary frequencies that go by a text's length: dynamic, and longrope with its lists of factors,
on both sides of the original context, against `transformers`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from their_models import BPE, exact, open_there, their_model

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.checkpoint.hugging_face.families.table import families
from pentameter.checkpoint.hugging_face.folder import export_hf, read_hf
from pentameter.checkpoint.hugging_face.rotary_rules import rotary_rule
from pentameter.cli.main import main
from pentameter.config.model.architecture import ModelConfig
from pentameter.generation.loop import generate

ORIGINAL, LONGEST = 10, 25
SIZES = {"hidden_size": 24, "num_key_value_heads": 2, "vocab_size": BPE.vocab_size}
DYNAMIC = {
    "max_position_embeddings": ORIGINAL,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.5},
}
LONGROPE = {
    "max_position_embeddings": LONGEST,
    "original_max_position_embeddings": ORIGINAL,  # Phi-3 has it here
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0, 1.5, 2.0],
        "long_factor": [1.25, 3.0, 7.5],
        "original_max_position_embeddings": ORIGINAL,
    },
}
FORMS = {"dynamic": DYNAMIC, "longrope": LONGROPE}
LENGTHS = (3, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, ORIGINAL + 4, LONGEST)


def tokens_of(n_tokens):
    generator = torch.Generator().manual_seed(n_tokens)
    return torch.randint(BPE.vocab_size, (2, n_tokens), generator=generator)


def agree(folder, model):
    """Hold a model here to the folder's, freshly opened for each length: theirs keep the
    frequencies of the longest text so far."""
    for n_tokens in LENGTHS:
        with torch.no_grad():
            theirs = exact(open_there(folder))(tokens_of(n_tokens)).logits
            ours = model(tokens_of(n_tokens))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "dynamic"), ("qwen2", "dynamic"), ("llama", "longrope"), ("phi3", "longrope")],
)
def test_logits_are_theirs_on_both_sides_of_the_original_length(tmp_path, family, form):
    their_model(tmp_path / "in", family, {**SIZES, **FORMS[form]})
    stored = read_hf(tmp_path / "in")
    scaling = stored.config.model.rope_scaling
    assert (scaling.type, scaling.original_context_length) == (form, ORIGINAL)
    assert stored.config.model.context_length == LONGEST  # dynamic's: factor times the original
    agree(tmp_path / "in", load_model(tmp_path / "in").model)
    exported = export_hf(stored, tmp_path / "out").path
    agree(exported, load_model(tmp_path / "in").model)
    again = read_hf(exported).config.model
    assert again.rope_scaling == scaling
    assert again.context_length == LONGEST


@pytest.mark.parametrize("form", FORMS)
def test_the_sides_differ(tmp_path, form):
    their_model(tmp_path, "llama", {**SIZES, **FORMS[form]})
    model, tokens = load_model(tmp_path).model, tokens_of(ORIGINAL + 1)
    with torch.no_grad():
        short, long = model(tokens[:, :-1]), model(tokens)[:, :-1]
    assert (short - long).abs().max() > 1e-3


@pytest.mark.parametrize("context_length", [LONGEST - 2, ORIGINAL - 4])
def test_a_context_that_is_not_factor_times_the_original_goes_out_and_in(tmp_path, context_length):
    their_model(tmp_path / "in", "llama", {**SIZES, **DYNAMIC})
    stored = read_hf(tmp_path / "in")
    config = stored.config.updated({"model.context_length": context_length})
    exported = export_hf(replace(stored, config=config), tmp_path / "out").path
    assert read_hf(exported).config.model == config.model
    assert json.loads((exported / "config.json").read_text())["max_position_embeddings"] == ORIGINAL
    agree(exported, load_model(tmp_path / "in").model)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_trained_goes_out_and_in_again(tmp_path, monkeypatch, form):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    their_model(tmp_path / "in", "llama", {**SIZES, **FORMS[form]})
    (tmp_path / "cats.txt").write_text("the cat sat on the mat, and that was that.\n" * 40)
    given = ["train", "--init-from", "in", "--data.path", "cats.txt", "--train.steps", "2"]
    given += ["--optimizer.learning-rate", "0.01", "--train.compile", "false", "--run-dir", "run"]
    assert main([*given, "--train.precision", "fp32", "--train.sample-interval", "1"]) == 0
    assert main(["export", "run", "--to", "hf", "--out", "out"]) == 0
    trained = load_model(tmp_path / "run").model.double()
    agree(tmp_path / "out", trained)
    again = load_model(tmp_path / "out").model.double()
    for n_tokens in LENGTHS:
        with torch.no_grad():
            assert torch.equal(again(tokens_of(n_tokens)), trained(tokens_of(n_tokens)))


def test_cached_text_of_dynamic_positions_is_transformers_own(tmp_path):
    """Their cache keeps each key as it was rotated when it was new, and so does ours."""
    their_model(tmp_path, "llama", {**SIZES, **DYNAMIC})
    loaded = load_model(tmp_path)
    for prompt in ("the cat", "the cat sat on the mat, and that was that."):
        ids = torch.from_numpy(loaded.tokenizer.encode(prompt))[None]
        n_new = LONGEST - ids.shape[1]
        theirs = exact(open_there(tmp_path))
        found = theirs.generate(ids, max_new_tokens=n_new, do_sample=False, eos_token_id=None)
        assert ids.shape[1] + n_new > ORIGINAL
        (text,) = generate(
            loaded.model, loaded.tokenizer, prompt, temperature=0, max_new_tokens=n_new
        )
        assert text == loaded.tokenizer.decode(found[0, ids.shape[1] :].numpy())


def test_cached_text_with_factors_is_that_of_whole_passes_and_phi3s_own(tmp_path):
    """Where the factors change, what was cached is computed anew, as Phi-3 does."""
    their_model(tmp_path, "phi3", {**SIZES, **LONGROPE})
    loaded, theirs = load_model(tmp_path), exact(open_there(tmp_path))
    prompt = torch.from_numpy(loaded.tokenizer.encode("the cat"))[None]
    n_prompt, ids = prompt.shape[1], prompt
    assert n_prompt < ORIGINAL
    with torch.no_grad():
        while ids.shape[1] < LONGEST:
            ids = torch.cat([ids, theirs(ids).logits[:, -1:].argmax(-1)], dim=1)
    n_new = LONGEST - n_prompt
    own = exact(open_there(tmp_path)).generate(
        prompt, max_new_tokens=n_new, do_sample=False, eos_token_id=None
    )
    assert torch.equal(own, ids)
    (text,) = generate(
        loaded.model, loaded.tokenizer, "the cat", temperature=0, max_new_tokens=n_new
    )
    assert text == loaded.tokenizer.decode(ids[0, n_prompt:].numpy())


def test_phi3s_configuration_is_read():
    """The original length lies beside the object there, and the form had another name."""
    content = {
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [1.5] * 4},
    }
    rule = rotary_rule()
    read = rule.read(content, {"context_length": 131072})
    values = {"n_heads": 2, "d_model": 16, "positions": "rotary", "context_length": 131072}
    model = ModelConfig.model_validate({**values, **read})
    scaling = model.rope_scaling
    assert (scaling.type, scaling.original_context_length, scaling.factor) == (
        "longrope", 4096, 32.0,
    )  # fmt: skip
    assert scaling.rotation_factor == pytest.approx(1.1902380714238083, abs=1e-15)
    written = rule.write(model)
    assert written["original_max_position_embeddings"] == 4096
    assert json.loads(json.dumps(written["rope_parameters"]))["long_factor"] == [1.5] * 4
    assert rule.read(written, {"context_length": 131072}) == {
        "rope_theta": 10000.0,
        "rope_scaling": {**read["rope_scaling"]},
    }


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"type": "longrope", "short_factors": [1.0]}, "short_factors has 1 numbers, and 4 pairs"),
        ({"type": "longrope", "original_context_length": 1}, "must be above 1"),
        ({"type": "yarn", "long_factors": [1.0] * 4}, "long_factors has no effect .*type='yarn'"),
        ({"type": "dynamic", "attention_factor": 1.5}, "attention_factor has no effect"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_with_the_reason(scaling, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig(positions="rotary", d_model=16, n_heads=2, rope_scaling=scaling)


def test_dynamic_needs_more_than_one_pair():
    with pytest.raises(ValueError, match=r"'dynamic' spreads .* 2 channels rotate"):
        ModelConfig(positions="rotary", d_model=4, n_heads=2, rope_scaling={"type": "dynamic"})


def test_every_family_that_rotates_reads_both():
    assert {name for name, family in families().items() if "rope_scaling" not in family.fixed} >= {
        "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "olmo2",
    }  # fmt: skip
