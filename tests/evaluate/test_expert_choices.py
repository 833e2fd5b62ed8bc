"""Which experts tokens are sent to: as the routers choose, whole texts, on the command line."""

import json
import re

import numpy as np
import pytest
import torch

from pentameter.checkpoint.folders.model_folder import StoredModel, save_model
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.cli.main import main
from pentameter.config.schema import Config
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.errors import ConfigError
from pentameter.evaluate.expert_choices import expert_choices
from pentameter.model.gpt import build_model

TOKENIZER = CharTokenizer("\n abcd")
TEXT = "abba cab\ndad " * 2  # longer than the context


def configuration(**model):
    keys = {"context_length": 10, "n_layers": 3, "n_heads": 2, "d_model": 8, "init_std": 0.5}
    mixture = {"n_experts": 5, "dense_layers": (1,)}
    return Config.model_validate(
        {
            "model": {"vocab_size": TOKENIZER.vocab_size, **keys, **mixture, **model},
            "data": {"corpus": "stdlib"},
            "train": {"batch_size": 2},
        }
    )


def saved(folder, **model):
    config = configuration(**model)
    built = build_model(config.model, seed=5).eval()
    save_model(StoredModel(folder, config, TOKENIZER, model_state(built), (), None), folder)
    return built


def test_each_piece_of_a_text_is_routed_by_itself():
    model = build_model(configuration().model, seed=5).eval()
    tokens = TOKENIZER.encode(TEXT)
    found = expert_choices(model, tokens)
    assert [each.layer for each in found] == [0, 2]
    for each in found:
        assert each.experts.shape == each.weights.shape == (len(tokens), 2)
        assert each.experts.max() < each.n_experts == 5
    second = expert_choices(model, tokens[10:20])
    for whole, piece in zip(found, second, strict=True):
        assert np.array_equal(whole.experts[10:20], piece.experts)
    own = []
    router = model.get_submodule("blocks.2.experts.router")
    router.register_forward_hook(lambda _module, _inputs, routing: own.append(routing))
    with torch.no_grad():
        model(torch.from_numpy(tokens[None, :10]))
    assert np.array_equal(found[1].experts[:10], own[0].experts.numpy())
    np.testing.assert_allclose(found[1].weights[:10], own[0].weights.numpy(), rtol=1e-6)


def test_a_dense_model_has_none():
    model = build_model(configuration(n_experts=None, dense_layers=0).model, seed=5)
    with pytest.raises(ConfigError, match="no experts"):
        expert_choices(model, TOKENIZER.encode("ab"))


def test_the_table_and_the_object_of_sample(tmp_path, capsys):
    saved(tmp_path / "model")
    command = ["sample", str(tmp_path / "model"), "--experts", "--prompt", TEXT]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "".join(token["text"] for token in told["tokens"]) == TEXT
    assert [layer["layer"] for layer in told["layers"]] == [0, 2]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert f"layer 2: {len(TEXT)} tokens, 2 experts for each" in table
    experts = np.array(told["layers"][1]["experts"])
    for expert in range(5):
        words = [c for c, own in zip(TEXT, experts, strict=True) if expert in own]
        share = f"{len(words) / experts.size:.1%}"
        row = rf"^ +{expert} +{len(words)} +{share}"
        assert re.search(row, table.split("layer 2")[1], flags=re.MULTILINE), row


def test_a_text_is_needed(tmp_path, capsys):
    saved(tmp_path / "model")
    assert main(["sample", str(tmp_path / "model"), "--experts"]) == 2
    assert "--prompt TEXT" in capsys.readouterr().err
