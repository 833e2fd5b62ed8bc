"""A mixture that begins with a dense model's weights: the same outputs, or a refusal; noise, and
channels that begin anew, on any layout the same."""

from __future__ import annotations

import math
import re

import pytest
import torch

from pentameter.checkpoint.folders.model_folder import StoredModel, save_model
from pentameter.checkpoint.hugging_face.folder import export_hf
from pentameter.checkpoint.state.initial_weights import initial_weights
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.config.schema import Config
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.errors import ConfigError
from pentameter.model.gpt import GPT, build_model
from pentameter.train.loop import Trainer

BPE = train_bpe(["the cat sat on the mat"], 260)
DENSE = {
    "vocab_size": BPE.vocab_size,
    "context_length": 12,
    "n_layers": 2,
    "n_heads": 2,
    "d_model": 8,
    "d_ff": 12,
    "bias": True,
    "qkv_bias": True,
    "init_std": 0.5,
}
MIXTURE = {"n_experts": 5, "router_renormalize": True}


def configuration(train=None, **model):
    return Config.model_validate(
        {
            "model": {**DENSE, **model},
            "data": {"corpus": "stdlib"},
            "train": {"batch_size": 2, **(train or {})},
        }
    )


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A dense model, and its folders of both kinds."""
    folder, config = tmp_path_factory.mktemp("dense"), configuration()
    model = build_model(config.model, seed=5).eval()
    stored = StoredModel(folder, config, BPE, model_state(model), (), None)
    save_model(stored, folder / "ours")
    export_hf(stored, folder / "hf")
    return model, folder


def begun(path, config) -> GPT:
    model = build_model(config.model, seed=config.seed)
    initial_weights(path, config, BPE).load_into(model)
    return model.eval()


EQUAL = {
    "renormalized": {"router_renormalize": True},
    "softmax of the chosen": {"router_top_k_first": True, "balance": "batch"},
    "sigmoids, one dense layer": {
        "router": "sigmoid",
        "router_renormalize": True,
        "balance": "bias",
        "router_bias": True,
        "dense_layers": 1,
    },
    "all experts": {"experts_per_token": 5, "router_z_loss": 0.1},
    "room for every token": {"router_renormalize": True, "expert_capacity": 2.5},
}


@pytest.mark.parametrize("form", ["ours", "hf"])
@pytest.mark.parametrize("name", EQUAL)
def test_a_mixture_computes_what_the_dense_model_does(dense, name, form):
    model, folder = dense
    here = configuration(**{**MIXTURE, "router_renormalize": False, **EQUAL[name]})
    mixture = begun(folder / form, here)
    tokens = torch.randint(BPE.vocab_size, (4, 13), generator=torch.Generator().manual_seed(0))
    losses = [m(tokens[:, :-1], targets=tokens[:, 1:]).item() for m in (mixture, model)]
    assert losses[0] / losses[1] == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(mixture(tokens[:, :-1]), model(tokens[:, :-1]), rtol=0, atol=1e-5)
    routers = [p for n, p in mixture.named_parameters() if n.endswith("router.weight")]
    assert all(router.std() > 0.3 for router in routers)  # they begin with the run


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"router_renormalize": False}, "model.router.renormalize=true or model.router.top_k_f"),
        ({"router_scale": 2.5}, "model.router.scale=1 instead of 2.5"),
        ({"d_expert": 6}, "model.experts.width=12 instead of 6 (the width of what is copied)"),
        ({"n_shared_experts": 1}, "model.experts.n_shared=0 instead of 1"),
        ({"expert_capacity": 2.0}, "model.experts.capacity=2.5 or more, or none, instead of 2"),
        ({"n_layers": 3}, "the architecture differs; model.n_layers: 2 there, 3 here"),
    ],
)
def test_what_would_not_be_equal_is_refused(dense, keys, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        initial_weights(dense[1] / "ours", configuration(**{**MIXTURE, **keys}), BPE)


def test_a_mixture_becomes_no_dense_model(tmp_path):
    config = configuration(**MIXTURE)
    model = build_model(config.model, seed=5)
    save_model(StoredModel(tmp_path, config, BPE, model_state(model), (), None), tmp_path / "m")
    with pytest.raises(ConfigError, match=r"model\.experts\.count: 5 there, none here"):
        initial_weights(tmp_path / "m", configuration(), BPE)


def test_noise_is_a_fraction_of_each_experts_own_initial_values(dense):
    here = configuration({"upcycle_noise": 0.25}, **MIXTURE)
    initial = build_model(here.model, seed=here.seed).state_dict()
    found = begun(dense[1] / "ours", here).state_dict()
    for name in ("up.weight", "down.weight", "up.bias"):
        copied = dense[0].state_dict()[f"blocks.1.mlp.{name}"]
        full = f"blocks.1.experts.{name}"
        assert torch.equal(found[full], 0.25 * initial[full] + copied)


def test_dropped_channels_begin_anew_in_all_matrices_of_an_expert(dense):
    here = configuration({"upcycle_drop": 0.5}, **MIXTURE)
    initial = build_model(here.model, seed=here.seed).state_dict()
    found = begun(dense[1] / "ours", here).state_dict()
    copies = dense[0].state_dict()
    chosen = []
    for layer in range(2):
        path, source = f"blocks.{layer}.experts", f"blocks.{layer}.mlp"
        up, down = found[f"{path}.up.weight"], found[f"{path}.down.weight"]
        is_copy = (up == copies[f"{source}.up.weight"]).all(2)  # (experts, channels)
        assert torch.equal(is_copy, (down == copies[f"{source}.down.weight"]).all(1))
        assert torch.equal(is_copy, ~(up == initial[f"{path}.up.weight"]).all(2))
        assert torch.equal(~is_copy, (down == initial[f"{path}.down.weight"]).all(1))
        bias = torch.where(is_copy, copies[f"{source}.up.bias"], initial[f"{path}.up.bias"])
        assert torch.equal(found[f"{path}.up.bias"], bias)
        assert torch.equal(found[f"{path}.down.bias"], copies[f"{source}.down.bias"].expand(5, 8))
        chosen += is_copy.tolist()
    assert len({tuple(row) for row in chosen}) == 10  # each expert has its own
    share = sum(map(sum, chosen)) / 120
    assert abs(share - 0.5) < 4 * math.sqrt(0.25 / 120)


def test_options_of_copies_need_experts():
    with pytest.raises(ValueError, match=r"train\.upcycle_noise=0\.5 is of experts"):
        configuration({"upcycle_noise": 0.5})


def test_a_run_begins_with_the_loss_of_the_dense_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def trained(name, steps, model=None, **options):
        config = Config.model_validate(
            {
                "model": {"context_length": 16, "n_layers": 1, "n_heads": 2, "d_model": 16}
                | (model or {}),
                "data": {"corpus": "grammar", "grammar": {"n_characters": 3000}},
                "optimizer": {"learning_rate": 1e-2},
                "train": {
                    "steps": steps,
                    "batch_size": 4,
                    "eval_interval": 6,
                    "precision": "fp32",
                    "compile": False,
                    **options.pop("train", {}),
                },
            }
        )
        losses = []

        class Losses:
            def on_eval(self, run, metrics):
                losses.append(metrics.loss)

        Trainer(config, run_dir=tmp_path / name, hooks=[Losses()], quiet=True, **options).fit()
        return losses

    dense = trained("dense", 6)
    mixture = trained("mixture", 2, MIXTURE, init_from=tmp_path / "dense")
    assert mixture[0] == pytest.approx(min(dense), abs=1e-6)
    noise = {"upcycle_noise": 0.1}
    noisy = trained("noisy", 2, MIXTURE, init_from=tmp_path / "dense", train=noise)
    assert 1e-6 < abs(noisy[0] - mixture[0]) < 0.1
    trained("random", 1, MIXTURE, train=noise)
    said = (tmp_path / "random" / "log.txt").read_text()
    assert "train.upcycle_noise=0.1 is left out: experts begin with random weights" in said
