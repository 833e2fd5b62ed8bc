from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from pentameter.checkpoint.folders import load_model as load_model_module
from pentameter.checkpoint.folders.load_model import load_model
from pentameter.checkpoint.folders.opening import find_model
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.config.files.load import load_config
from pentameter.config.files.write import to_toml
from pentameter.config.schema import Config
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.errors import CorruptError
from pentameter.model.gpt import GPT
from pentameter.model.initial import initialize


@pytest.fixture
def run(tmp_path):
    tokenizer = CharTokenizer("abcdefgh \n")
    config = Config.model_validate(
        {
            "model": {
                "vocab_size": tokenizer.vocab_size,
                "vocab_multiple": 8,
                "n_layers": 2,
                "n_heads": 2,
                "d_model": 8,
                "context_length": 12,
                "dropout": 0.1,
            },
            "data": {"corpus": "stdlib"},
            "train": {"batch_size": 2},
        }
    )
    tokenizer.save(tmp_path / "tokenizer.json")
    store = CheckpointStore(tmp_path / "run" / "checkpoints", run_id="r", config_hash="c")
    extra = {
        "config.toml": to_toml(config).encode(),
        "tokenizer.json": (tmp_path / "tokenizer.json").read_bytes(),
    }

    def save(step, dtype=torch.float32, best=None):
        model = GPT(config.model).to(dtype)
        initialize(model, config.model, seed=step)
        state = {"step": step, "best": best and {"step": best, "loss": 1.0}}
        store.save(Contents(step, {"model": model_state(model), "optimizer": {}}, state, extra))
        return model

    return store.folder.parent, config, tokenizer, save, store


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_model_answers_the_same(run, dtype):
    folder, config, tokenizer, save, _ = run
    model = save(3, dtype).eval()
    loaded = load_model(folder)
    tokens = torch.tensor([[1, 2, 3, 0]])
    assert torch.equal(loaded.model(tokens), model(tokens))
    assert not loaded.model.training
    assert next(loaded.model.parameters()).dtype == dtype
    assert loaded.config == config
    assert loaded.tokenizer.hash == tokenizer.hash
    assert loaded.checkpoint.step == 3
    assert load_config(loaded.checkpoint.path / "config.toml") == config


def test_a_run_answers_with_its_best(run):
    folder, _, _, save, _ = run
    best = save(3, best=3).eval()
    save(6, best=3)
    tokens = torch.tensor([[5]])
    assert torch.equal(load_model(str(folder)).model(tokens), best(tokens))


def test_a_checkpoint_pruned_while_it_is_loaded_gives_way_to_the_next(run, monkeypatch):
    folder, _, _, save, store = run
    save(1)

    def find(path, warnings, *others):
        found = find_model(path, warnings, *others)
        if found.step == 1:
            save(2)
            store.prune(1)
        return found

    monkeypatch.setattr(load_model_module, "find_model", find)
    assert load_model(folder).checkpoint.step == 2


def test_weights_of_another_architecture_are_refused(run, tmp_path):
    folder, config, _, save, store = run
    save(1)
    checkpoint = store.latest()
    smaller = config.model.model_copy(update={"n_layers": 1})
    other = config.model_copy(update={"model": smaller})
    files = {name: checkpoint.read(name) for name in ("config.toml", "tokenizer.json")}
    tensors = {"model": checkpoint.tensors("model")}
    store.save(Contents(2, tensors, {"step": 2}, {**files, "config.toml": to_toml(other).encode()}))
    with pytest.raises(CorruptError, match=r"unexpected: blocks\.1\."):
        load_model(folder)
    assert dataclasses.is_dataclass(load_model(checkpoint.path))
    shutil.copytree(checkpoint.path, tmp_path / "anywhere")
    assert load_model(tmp_path / "anywhere").checkpoint.step == 1
