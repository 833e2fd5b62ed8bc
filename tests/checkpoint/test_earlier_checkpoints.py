"""Checkpoints that an earlier version wrote open as they did, and the same tensors give its bytes.

`earlier/checkpoints.tar.xz` holds what `train quickstart` of version 0.1 left after two steps of a
GPT with 11 tokens, 2 layers and width 4: by one process, and by two with `parallel.zero = 2`,
`tensor = 2` and `pipeline = 2`. The digests below are of its tensors, as that version read them.
"""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import pytest
import torch

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.save_phases import Contents

ARCHIVE = Path(__file__).parent / "earlier" / "checkpoints.tar.xz"

DIGESTS = {
    "one": {
        "model": "b9c440e96eea95ea66a148d8fde39ffb05ea102f8c02b6060e4bbe1bfa2008ea",
        "optimizer": "8ad0ddd5fad2d18e90f08422e244e0bde5f4ff269ceb5386c9d45a67caeec40b",
    },
    "zero": {
        "model": "b9c440e96eea95ea66a148d8fde39ffb05ea102f8c02b6060e4bbe1bfa2008ea",
        "optimizer": "734487736844bb6fdf642c082f744f94d1251c155d7f25ea0f48ee0af90f0015",
    },
    "tensor": {
        "model": "eb34b64b476525a353634234a1e8678dd97123733ce850d82b46e5fa40550924",
        "optimizer": "998da6eda7a2a24c2ae2b7e52ed3628480b61fc39ebaea346ac3b946b4f03955",
    },
    "pipeline": {
        "model": "b9c440e96eea95ea66a148d8fde39ffb05ea102f8c02b6060e4bbe1bfa2008ea",
        "optimizer": "82e3b9039b9386b2300efb841af7e6949e7aca5767697bc3dc55fa0ebb57fbb1",
    },
}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """The folder that holds one checkpoint per layout."""
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def digest(tensors) -> str:
    """sha256 of names, shapes, dtypes and values."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name][...]
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("layout", DIGESTS)
def test_every_tensor_reads_as_it_did(earlier, layout):
    checkpoint = open_checkpoint(earlier / layout)
    found = {group: digest(checkpoint.tensors(group)) for group in DIGESTS[layout]}
    assert found == DIGESTS[layout]
    assert checkpoint.step == checkpoint.state["step"] == 2
    assert checkpoint.manifest.layout["zero"] == (2 if layout == "zero" else 0)


@pytest.mark.parametrize("layout", DIGESTS)
def test_the_model_loads(earlier, layout):
    loaded = load_model(earlier / layout)
    assert digest(loaded.model.state_dict()) == DIGESTS[layout]["model"]
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the cat")) == "the cat"


def test_one_process_writes_the_same_bytes(earlier, tmp_path):
    checkpoint = open_checkpoint(earlier / "one")
    store = CheckpointStore(
        tmp_path, run_id=checkpoint.manifest.run_id, config_hash=checkpoint.manifest.config_hash
    )
    saved = store.save(
        Contents(
            checkpoint.step,
            {group: checkpoint.tensors(group) for group in checkpoint.manifest.groups},
            checkpoint.state,
            {name: checkpoint.read(name) for name in ("config.toml", "tokenizer.json")},
            checkpoint.manifest.layout,
        )
    )
    names = sorted(path.name for path in checkpoint.path.iterdir())
    assert sorted(path.name for path in saved.path.iterdir()) == names
    for name in names:
        assert (saved.path / name).read_bytes() == (checkpoint.path / name).read_bytes(), name
