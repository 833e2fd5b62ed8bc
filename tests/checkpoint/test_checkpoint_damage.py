from __future__ import annotations

import json
import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.checkpoint.format.manifest import Manifest
from pentameter.errors import ConfigError, CorruptError
from trials.faults.damage import DAMAGES, FILES, swap_with_older


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_named_and_passed_over(store, save, name, damage):
    save(store, 1)
    saved = save(store, 2)
    if damage is swap_with_older and name == "config.toml":
        pytest.skip("the same in every checkpoint")
    damage(saved.path / name)
    with pytest.raises(CorruptError, match=name):
        open_checkpoint(saved.path)
    assert store.latest().step == 1
    assert len(store.warnings) == 1
    assert name in store.warnings[0]
    damage_older = store.folder / "step-00000001" / "state.json"
    damage_older.unlink()
    with pytest.raises(CorruptError, match=rf"every checkpoint .* is damaged .2.*{name}") as caught:
        store.latest()
    assert caught.value.exit_code == 65


def test_swapped_files_and_folders_are_found(store, save):
    first, second = save(store, 1).path, save(store, 2).path
    model, optimizer = second / "model.safetensors", second / "optimizer.safetensors"
    model.rename(second / "x")
    optimizer.rename(model)
    (second / "x").rename(optimizer)
    with pytest.raises(CorruptError, match=r"safetensors is damaged"):
        open_checkpoint(second)
    shutil.rmtree(second)
    first.rename(second)
    with pytest.raises(CorruptError, match=r"manifest.json is of step 1"):
        open_checkpoint(second)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    import torch

    from pentameter.checkpoint.folders.store import CheckpointStore
    from pentameter.checkpoint.format.save_phases import Contents

    store = CheckpointStore(tmp_path_factory.mktemp("flips"), run_id="r", config_hash="c")
    tensors = {"model": {"w": torch.arange(20.0)}, "optimizer": {"w.step": torch.tensor(3)}}
    path = store.save(Contents(4, tensors, {"step": 4}, {"config.toml": b"seed = 1\n"})).path
    return path, {name: (path / name).read_bytes() for name in FILES}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_flipped_bit_is_found(whole, data):
    path, contents = whole
    name = data.draw(st.sampled_from(FILES))
    bit = data.draw(st.integers(0, 8 * len(contents[name]) - 1))
    damaged = bytearray(contents[name])
    damaged[bit // 8] ^= 1 << bit % 8
    (path / name).write_bytes(damaged)
    try:
        with pytest.raises(CorruptError):
            open_checkpoint(path)
    finally:
        (path / name).write_bytes(contents[name])
    assert open_checkpoint(path).step == 4


def rewrite(path, change):
    """A manifest with a true checksum of a malicious content."""
    import hashlib

    from pentameter.checkpoint.format.manifest import encode_json

    content = json.loads((path / "manifest.json").read_text())
    del content["manifest_sha256"]
    change(content)
    content["manifest_sha256"] = hashlib.sha256(encode_json(content)).hexdigest()
    (path / "manifest.json").write_bytes(encode_json(content))


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "..", "a/b", "a\\b", "", ".x", "\0"]
)
def test_a_manifest_cannot_lead_outside(store, save, name):
    path = save(store, 2).path

    def change(content):
        content["files"][name] = content["files"].pop("config.toml")

    rewrite(path, change)
    with pytest.raises(CorruptError, match=r"could lead out of the folder"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(step=-1),
        lambda content: content.update(step="2"),
        lambda content: content.update(files=[]),
        lambda content: content.update(groups={"model": ["other"]}),
        lambda content: content["files"]["state.json"].update(n_bytes=-1),
        lambda content: content["files"]["state.json"].update(n_bytes=1.5),
        lambda content: content["files"]["state.json"].update(sha256="x"),
        lambda content: content["files"]["state.json"].update(sha256=None),
        lambda content: content["files"]["state.json"].update(extra=1),
        lambda content: content.update(extra=1),
        lambda content: content.pop("run_id"),
        lambda content: content.pop("layout"),
        lambda content: content.update(layout={"data": "many"}),
        lambda content: content.update(groups={"model": [["a"]]}),
    ],
)
def test_a_malformed_manifest_is_refused(store, save, change):
    path = save(store, 2).path
    rewrite(path, change)
    with pytest.raises(CorruptError, match=r"manifest.json"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        "null",
        "{}",
        "[" * 100_000,
        '{"step": 1e999}',
        "\ufeff{}",
        "NaN",
        '{"layout": 1e999}',
        '"x"',
        "\0",
    ],
)
def test_any_text_in_place_of_a_manifest_is_refused(store, save, text):
    path = save(store, 2).path
    (path / "manifest.json").write_text(text)
    with pytest.raises(CorruptError, match=r"manifest.json"):
        open_checkpoint(path)


def test_a_newer_format_says_so(store, save):
    path = save(store, 2).path
    rewrite(path, lambda content: content.update(format_version=99))
    with pytest.raises(CorruptError, match=r"format_version=99.*newer"):
        open_checkpoint(path)


class Bomb:
    def __reduce__(self):
        return os._exit, (42,)


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_is_data_not_code(store, save, name):
    """Even under a true manifest, a file that is a pickle is refused and never run."""
    import pickle

    path = save(store, 2).path
    (path / name).write_bytes(pickle.dumps(Bomb()))
    if name != "manifest.json":
        from pentameter.disk.atomic import FileRecord

        data = (path / name).read_bytes()
        import hashlib

        record = FileRecord(name, len(data), hashlib.sha256(data).hexdigest())
        rewrite(
            path,
            lambda content: content["files"].update(
                {name: {"n_bytes": record.n_bytes, "sha256": record.sha256}}
            ),
        )
    if name == "config.toml":
        assert open_checkpoint(path).read(name) == pickle.dumps(Bomb())
        return
    with pytest.raises(CorruptError, match=name):
        open_checkpoint(path).tensors(name.partition(".")[0])


def test_an_unfinished_folder_does_not_open(store, save):
    path = save(store, 2).path
    target = path.with_name("step-00000002.tmp-" + "a" * 32)
    path.rename(target)
    with pytest.raises(CorruptError, match=r"unfinished"):
        open_checkpoint(target)


def test_a_manifest_survives_its_own_bytes(store, save):
    checkpoint = open_checkpoint(save(store, 2).path)
    assert isinstance(checkpoint.manifest, Manifest)
    assert checkpoint.manifest.to_bytes() == (checkpoint.path / "manifest.json").read_bytes()
    assert not issubclass(CorruptError, ConfigError)
