"""Every layout reads every other's checkpoint, bit for bit, the optimizer's state included."""

from __future__ import annotations

import json

import pytest
import torch
from layout_worlds import LAYOUTS, load_layouts, run_world, save_layouts, true_state

from pentameter.checkpoint.lazy_tensors import LazyTensor
from pentameter.checkpoint.opening import open_checkpoint

SIZES = sorted({shape.size for shape in LAYOUTS.values()})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Layout → the checkpoint that its processes saved."""
    folder = tmp_path_factory.mktemp("layouts")
    paths = {}
    for size in SIZES:
        first, *others = run_world(size, save_layouts, folder)
        assert all(other == first for other in others)
        paths |= first
    return paths


@pytest.fixture(scope="module")
def loaded(saved):
    """(saver, loader) → what was wrong, by rank."""
    results = {}
    for size in SIZES:
        by_rank = run_world(size, load_layouts, saved)
        for loader in by_rank[0]:
            for saver in saved:
                results[saver, loader] = [of_rank[loader][saver] for of_rank in by_rank]
    return results


@pytest.mark.parametrize("saver", LAYOUTS)
@pytest.mark.parametrize("loader", LAYOUTS)
def test_every_layout_reads_every_others(loaded, saver, loader):
    assert not any(loaded[saver, loader])


@pytest.mark.parametrize("saver", LAYOUTS)
def test_one_process_without_a_group_reads_it(saved, saver):
    checkpoint = open_checkpoint(saved[saver])
    for group, true in true_state().items():
        stored = checkpoint.tensors(group)
        assert stored.keys() == true.keys()
        for name, tensor in true.items():
            assert tuple(stored[name].shape) == tuple(tensor.shape)
            assert stored[name].dtype == tensor.dtype
            assert torch.equal(stored[name][...], tensor), name


def test_each_process_writes_a_file_and_each_element_once(saved):
    checkpoint = open_checkpoint(saved["data-tensor-pipeline"])
    groups = checkpoint.manifest.groups
    assert groups["model"] == tuple(f"model-{n:05d}-of-00008.safetensors" for n in range(8))
    assert checkpoint.manifest.layout == {"data": 8}
    n_bytes = sum(tensor.numel() * 4 for tensor in true_state()["model"].values())
    in_files = sum(
        checkpoint.manifest.record(name).n_bytes - header_bytes(checkpoint.path / name)
        for name in groups["model"]
    )
    assert in_files == n_bytes


def header_bytes(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_copies_share_out_the_writing(saved):
    checkpoint = open_checkpoint(saved["data"])
    sizes = [checkpoint.manifest.record(n).n_bytes for n in checkpoint.manifest.groups["optimizer"]]
    assert len(sizes) == 2
    assert max(sizes) < 2 * min(sizes)
    assert all(torch.is_tensor(tensor) for tensor in checkpoint.tensors("model").values())


def test_one_process_writes_as_it_always_did(saved):
    checkpoint = open_checkpoint(saved["one process"])
    assert checkpoint.manifest.groups["model"] == ("model.safetensors",)
    data = (checkpoint.path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : header_bytes(checkpoint.path / "model.safetensors")])
    assert header["__metadata__"] == {"format": "pt"}
    assert header.keys() - {"__metadata__"} == true_state()["model"].keys()


def test_a_piece_says_what_it_is_a_piece_of(saved):
    checkpoint = open_checkpoint(saved["zero"])
    assert isinstance(checkpoint.tensors("model")["embedding.weight"], LazyTensor)
    path = checkpoint.path / "model-00001-of-00002.safetensors"
    header = json.loads(path.read_bytes()[8 : header_bytes(path)])
    pieces = json.loads(header["__metadata__"]["pieces"])
    assert pieces["embedding.weight[33:65,0:8]"] == {
        "name": "embedding.weight", "shape": [65, 8], "offset": [33, 0]
    }  # fmt: skip
    assert header["embedding.weight[33:65,0:8]"]["shape"] == [32, 8]
