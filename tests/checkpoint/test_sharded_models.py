"""A model saved in pieces, opened by one process that never holds more than it must."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from layout_worlds import run_world
from sharded_worlds import (
    LLAMA,
    MIXTRAL,
    TOKENIZER,
    configuration,
    count_reads,
    initialize_from,
    initialize_from_theirs,
    load_wrongly,
    save_model_of_two,
)

from pentameter.checkpoint.folders.load_model import load_model, open_model
from pentameter.checkpoint.folders.model_folder import StoredModel, save_model
from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.hugging_face.folder import export_hf
from pentameter.checkpoint.state.initial_weights import initial_weights
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.model.gpt import build_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder whose checkpoint two processes saved, each with half of every matrix, and the
    model that it holds."""
    folder = tmp_path_factory.mktemp("run")
    config, tokenizer = run_world(2, save_model_of_two, folder)[0]
    return folder, config, tokenizer, build_model(config.model, seed=5).eval()


def test_sampling_and_evaluation_open_it(run):
    folder, _, _, true = run
    loaded = load_model(folder).model.state_dict()
    for name, tensor in true.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


def test_export_and_a_plain_copy_hold_the_same(run, tmp_path):
    folder, _, _, true = run
    stored = open_model(folder)
    assert isinstance(stored.weights["token_embedding.weight"], LazyTensor)
    export_hf(stored, tmp_path / "hf")
    save_model(stored, tmp_path / "plain")
    assert (tmp_path / "plain" / "model.safetensors").is_file()
    for name in ("hf", "plain"):
        theirs = load_model(tmp_path / name).model.state_dict()
        for key, tensor in true.state_dict().items():
            if "embedding" not in key:  # a Hugging Face folder has no padded rows
                assert torch.equal(theirs[key], tensor), key


@pytest.fixture
def assembled(monkeypatch):
    """Bytes of tensors made by `torch.empty`, the most alive at once."""
    alive: dict[int, int] = {}
    most = [0]
    real = torch.empty

    def empty(*arguments, **keywords):
        tensor = real(*arguments, **keywords)
        if tensor.device.type != "meta":
            alive[id(tensor)] = tensor.numel() * tensor.element_size()
            weakref.finalize(tensor, alive.pop, id(tensor))
            most[0] = max(most[0], sum(alive.values()))
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    return most


def test_memory_is_bounded_by_the_largest_tensor(run, tmp_path, assembled):
    folder, _, _, true = run
    largest = max(tensor.numel() * 4 for tensor in true.state_dict().values())
    load_model(folder)
    assert assembled == [0]  # the pieces go straight into the model
    export_hf(open_model(folder), tmp_path / "hf")
    assert 0 < assembled[0] <= largest


def test_a_run_begins_with_its_weights_in_one_process(run):
    folder, config, tokenizer, true = run
    model = build_model(config.model, seed=1).eval()
    initial_weights(folder, config, tokenizer).load_into(model)
    for name, tensor in model_state(model).items():
        own = tensor[: config.model.vocab_size] if "embedding" in name else tensor
        assert torch.equal(own, true.state_dict()[name][: len(own)]), name


def test_a_run_begins_with_weights_of_which_each_process_takes_its_part(run):
    """From pieces and from a whole file, another padding and a shorter context included."""
    folder = run[0]
    assert run_world(4, initialize_from, folder) == [[]] * 4


def test_each_process_takes_its_part_of_a_hugging_face_folder(tmp_path):
    for family, model in (("llama", LLAMA), ("mixtral", MIXTRAL)):
        config = configuration(**model)
        weights = model_state(build_model(config.model, seed=5))
        export_hf(StoredModel(tmp_path, config, TOKENIZER, weights, (), None), tmp_path / family)
    assert run_world(4, initialize_from_theirs, tmp_path) == [[]] * 4


def test_a_state_that_does_not_fit_is_refused_in_each_process(run):
    folder = run[0]
    for of_rank in run_world(2, load_wrongly, folder):
        assert "CorruptError" in of_rank["missing"]
        assert "missing: new.weight" in of_rank["missing"]
        assert "unexpected: blocks.0.mlp.up.bias" in of_rank["unexpected"]
        assert "CorruptError: the checkpoint's final_norm.weight is (8,)" in of_rank["shape"]
        assert "torch.float64" in of_rank["dtype"]
        assert of_rank["unchanged"]


def test_each_process_reads_its_own_part_and_a_failure_is_raised_in_each(run):
    for of_rank in run_world(2, count_reads, run[0]):
        assert of_rank["read"] == of_rank["has"]
        assert "cannot read" in of_rank["error"]


def test_the_manifest_lists_what_was_written(run):
    checkpoint = open_checkpoint(run[0] / "checkpoints" / "step-00000003")
    assert checkpoint.manifest.layout == {"data": 1, "tensor": 2}
    names = [f"model-{n:05d}-of-00002.safetensors" for n in (0, 1)]
    assert list(checkpoint.manifest.groups["model"]) == names
    assert checkpoint.manifest.groups["optimizer"] == ("optimizer.safetensors",)
    assert dict(checkpoint.tensors("optimizer")) == {}
    assert dataclasses.is_dataclass(checkpoint)
