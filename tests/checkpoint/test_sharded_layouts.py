"""Every layout reads every other's checkpoint, bit for bit, the optimizer's state included."""

from __future__ import annotations

import json

import pytest
import torch
from layout_worlds import LAYOUTS, load_layouts, run_world, save_layouts, true_state

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.checkpoint.format.lazy_tensors import LazyTensor

KINDS = (
    *("one process", "data", "tensor", "pipeline", "zero"),
    *("zero-copies", "zero-tensor-uneven", "grid", "grid-pipeline", "data-tensor-pipeline"),
    *("expert-tensor", "expert-zero"),
)
"""Layouts with each kind of shard and each place of it; the others combine the same in fewer ways.
"""


@pytest.fixture(
    scope="module",
    params=[KINDS, pytest.param(tuple(LAYOUTS), marks=pytest.mark.slow)],
    ids=["kinds", "all"],
)
def layouts(request):
    return request.param


@pytest.fixture(scope="module")
def sizes(layouts):
    return sorted({LAYOUTS[layout].size for layout in layouts})


@pytest.fixture(scope="module")
def saved(tmp_path_factory, layouts, sizes):
    """Layout → the checkpoint that its processes saved."""
    folder = tmp_path_factory.mktemp("layouts")
    paths = {}
    for size in sizes:
        first, *others = run_world(size, save_layouts, folder, layouts)
        assert all(other == first for other in others)
        paths |= first
    return paths


@pytest.fixture(scope="module")
def loaded(saved, layouts, sizes):
    """(saver, loader) → what was wrong, by rank."""
    results = {}
    for size in sizes:
        by_rank = run_world(size, load_layouts, saved, layouts)
        for loader in by_rank[0]:
            for saver in saved:
                results[saver, loader] = [of_rank[loader][saver] for of_rank in by_rank]
    return results


def test_every_layout_reads_every_others(loaded, layouts):
    assert loaded.keys() == {(saver, loader) for saver in layouts for loader in layouts}
    assert {pair: wrong for pair, wrong in loaded.items() if any(wrong)} == {}


def test_one_process_without_a_group_reads_all(saved, layouts):
    assert saved.keys() == set(layouts)
    for saver, path in saved.items():
        checkpoint = open_checkpoint(path)
        for group, true in true_state().items():
            stored = checkpoint.tensors(group)
            assert stored.keys() == true.keys(), saver
            for name, tensor in true.items():
                assert tuple(stored[name].shape) == tuple(tensor.shape), (saver, name)
                assert stored[name].dtype == tensor.dtype, (saver, name)
                assert torch.equal(stored[name][...], tensor), (saver, name)


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
