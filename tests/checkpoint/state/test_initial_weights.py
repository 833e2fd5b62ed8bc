from __future__ import annotations

import shutil

import pytest
import torch

from pentameter.checkpoint.folders.model_folder import StoredModel, save_model
from pentameter.checkpoint.hugging_face.folder import export_hf
from pentameter.checkpoint.state.initial_weights import (
    check_origin,
    initial_weights,
    not_the_architecture,
)
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.config.model.architecture import architecture
from pentameter.config.schema import Config
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.errors import ConfigError, CorruptError
from pentameter.model.gpt import GPT, build_model

BPE = train_bpe(["the cat sat on the mat"], 260)
MODEL = {
    "vocab_size": BPE.vocab_size,
    "vocab_multiple": 8,
    "context_length": 12,
    "n_layers": 2,
    "n_heads": 2,
    "d_model": 8,
    "bias": True,
    "qkv_bias": True,
}


def configuration(**model):
    return Config.model_validate(
        {"model": {**MODEL, **model}, "data": {"corpus": "stdlib"}, "train": {"batch_size": 2}}
    )


def saved(folder, **model):
    config = configuration(**model)
    built = build_model(config.model, seed=5).eval()
    save_model(StoredModel(folder, config, BPE, model_state(built), (), None), folder)
    return built


def padded_with_nothing(model):
    """Rows that pad the vocabulary never count: compare without them."""
    return {
        name: tensor[: BPE.vocab_size] if name.startswith(("token_embedding", "head")) else tensor
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("form", ["ours", "hf"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_of_another_model_are_copied(tmp_path, form, tied):
    source = saved(tmp_path / "ours", tied_head=tied)
    stored = initial_weights(tmp_path / "ours", configuration(tied_head=tied), BPE).stored
    export_hf(stored, tmp_path / "hf")
    here = configuration(tied_head=tied, context_length=7, vocab_multiple=64, dropout=0.3)
    model = build_model(here.model, seed=1, dtype=torch.float64).eval()
    weights = initial_weights(tmp_path / form, here, BPE)
    weights.load_into(model)
    tokens = torch.tensor([[1, 5, 259, 0, 7, 3, 2]])
    expected = source.double()(tokens)[..., : BPE.vocab_size]
    torch.testing.assert_close(model(tokens)[..., : BPE.vocab_size], expected, rtol=0, atol=0)
    assert weights.warnings == ()


def test_a_slice_takes_its_own(tmp_path):
    source = saved(tmp_path / "ours").state_dict()
    config = configuration()
    model = GPT(config.model, first_layer=1, last_layer=2)
    initial_weights(tmp_path / "ours", config, BPE).load_into(model)
    for name, tensor in padded_with_nothing(model).items():
        assert torch.equal(tensor, source[name][: len(tensor)])


def test_a_run_continues_from_where_it_began_only(tmp_path):
    saved(tmp_path / "a")
    stored = initial_weights(tmp_path / "a", configuration(), BPE).stored
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    export_hf(stored, tmp_path / "hf")
    export_hf(stored, tmp_path / "hf-copy")
    weights = model_state(build_model(configuration().model, seed=6))
    other = StoredModel(tmp_path, configuration(), BPE, weights, (), None)
    save_model(other, tmp_path / "b")
    export_hf(other, tmp_path / "hf-b")
    run = tmp_path / "run"
    for one, copy, changed in (("a", "copy", "b"), ("hf", "hf-copy", "hf-b")):
        origin = initial_weights(tmp_path / one, configuration(), BPE).origin
        check_origin(origin, tmp_path / one, run)
        check_origin(origin, tmp_path / "run" / ".." / one, run)
        check_origin(origin, tmp_path / copy, run)
        with pytest.raises(ConfigError, match="began with other weights, those of"):
            check_origin(origin, tmp_path / changed, run)
        with pytest.raises(ConfigError, match=rf"add --init-from {tmp_path / one} to continue"):
            check_origin(origin, None, run)
        with pytest.raises(ConfigError, match="began with random weights"):
            check_origin(None, tmp_path / one, run)
        shutil.rmtree(tmp_path / one)
        check_origin(origin, tmp_path / one, run)  # the run has weights of its own by now
    check_origin(None, None, run)


def test_another_architecture_is_refused_key_by_key(tmp_path):
    saved(tmp_path / "m")
    here = configuration(n_layers=3, activation="relu", bias=False, context_length=13)
    with pytest.raises(ConfigError) as caught:
        initial_weights(tmp_path / "m", here, BPE)
    message = str(caught.value)
    for part in (
        "model.n_layers: 2 there, 3 here; ",
        "model.feed_forward.activation: 'gelu' there, 'relu' here; ",
        "model.bias: true there, false here; ",
        "model.context_length: 12 there, 13 here (positions that were never learned",
        f"pentameter train {tmp_path / 'm' / 'config.toml'} --init-from",
    ):
        assert part in message
    assert "feed_forward.width" not in message  # absent in one, stated in the other: the same width
    initial_weights(tmp_path / "m", configuration(d_ff=32), BPE)


def test_how_experts_are_balanced_may_differ_but_for_a_bias(tmp_path):
    experts = {"n_experts": 4, "d_expert": 6}
    source = saved(tmp_path / "m", **experts, balance="batch").state_dict()
    model = GPT(configuration(**experts, balance="bias", router_z_loss=0.1).model)
    state = "blocks.1.experts.router.balance"
    model.state_dict()[state].fill_(7.0)
    here = configuration(
        **experts, balance="bias", router_z_loss=0.1, d_ff=20
    )  # which no layer has
    initial_weights(tmp_path / "m", here, BPE).load_into(model)
    for name, tensor in padded_with_nothing(model).items():
        if not name.endswith("router.balance"):
            assert torch.equal(tensor, source[name][: len(tensor)])
    assert model.state_dict()[state].eq(7.0).all()  # as this run begins
    saved(tmp_path / "biased", **experts, balance="bias")
    with pytest.raises(
        ConfigError, match=r"model\.router\.balance: 'bias' there, 'batch' here \(what it"
    ):
        initial_weights(tmp_path / "biased", configuration(**experts, balance="batch"), BPE)
    initial_weights(tmp_path / "biased", here, BPE).load_into(model)
    assert model.state_dict()[state].eq(0.0).all()


def test_longer_contexts_need_positions_that_are_not_learned(tmp_path):
    saved(tmp_path / "m", positions="sinusoidal")
    here = configuration(positions="sinusoidal", context_length=30)
    model = build_model(here.model, seed=1)
    initial_weights(tmp_path / "m", here, BPE).load_into(model)


def test_another_tokenizer_is_refused(tmp_path):
    saved(tmp_path / "m")
    other = train_bpe(["a rat at a vat, a rat at a vat"], 260)
    with pytest.raises(ConfigError, match=r"its tokenizer \(bpe, 260 tokens.* not the data's"):
        initial_weights(tmp_path / "m", configuration(), other)
    with pytest.raises(ConfigError, match=r"Set --data\.tokenizer .*/m/tokenizer\.json"):
        initial_weights(tmp_path / "m", configuration(), CharTokenizer("ab"))


def test_what_is_no_model_or_damaged_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        initial_weights(tmp_path / "absent", configuration(), BPE)
    saved(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=r"model\.safetensors is damaged"):
        initial_weights(tmp_path / "m", configuration(), BPE)


def test_every_key_of_the_schema_must_agree_or_says_why_not(tmp_path):
    saved(tmp_path / "there")
    here = configuration()
    keys = set(architecture(here.model))
    may_differ = not_the_architecture().keys()
    assert may_differ < keys
    # Some are read to find what differs.
    others = {"feed_forward.width": 3, "d_model": 16, "attention.n_heads": 1}
    others["positions"] = "sinusoidal"
    for key in keys - may_differ:
        other = here.updated({f"model.{key}": others.get(key, "made-up")})
        with pytest.raises(ConfigError, match=rf"model\.{key}: "):
            initial_weights(tmp_path / "there", other, BPE)
