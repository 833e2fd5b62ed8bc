from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import torch

from pentameter.checkpoint.folders import opening
from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.disk import atomic
from pentameter.disk.atomic import temporary_name
from pentameter.errors import ConfigError, CorruptError, StorageError


def names(store):
    return sorted(os.listdir(store.folder))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_round_trip_is_bit_exact_for_every_dtype(store):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (48,), generator=generator, dtype=torch.uint8)
    dtypes = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    ]  # fmt: skip
    shared = torch.randn(6, 4, generator=generator)
    group = {str(dtype): raw.view(dtype).clone() for dtype in dtypes}  # NaNs and all
    group |= {
        "bool": raw > 100,
        "scalar": torch.tensor(2**60 + 1),
        "scalar float": torch.tensor(1.0 / 3.0),
        "empty": torch.zeros(0, 3),
        "transposed": shared.T,
        "slice": shared[1:3, ::2],
        "tied": shared,
        "tied again": shared,
        "parameter": torch.nn.Parameter(shared.clone()),
        "conjugate": torch.randn(3, dtype=torch.complex64, generator=generator).conj(),
        '名前 "quoted"': torch.ones(1),
        "large": torch.randn(3_000_001, generator=generator),  # beyond the inline hashing
    }
    store.save(Contents(7, {"model": group}, {"step": 7}, {}))
    loaded = store.latest().tensors("model")
    assert loaded.keys() == group.keys()
    for name, tensor in group.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        assert torch.equal(bits(loaded[name]), bits(tensor.detach().resolve_conj())), name


def test_the_files_are_what_the_library_writes_and_reads(store, save, tensors_of):
    from safetensors.torch import load_file

    saved = save(store, 3)
    loaded = load_file(saved.path / "model.safetensors")
    for name, tensor in tensors_of(3)["model"].items():
        assert torch.equal(loaded[name], tensor)
    with open(saved.path / "model.safetensors", "rb") as file:
        assert int.from_bytes(file.read(8), "little") % 8 == 0  # data stays aligned


def test_a_checkpoint_knows_what_was_saved(store, save):
    saved = save(store, 500, best=250)
    assert saved.path == store.folder / "step-00000500"
    assert saved.n_bytes == sum(
        file.stat().st_size for file in saved.path.iterdir() if file.name != "manifest.json"
    )
    checkpoint = open_checkpoint(saved.path)
    assert (checkpoint.step, checkpoint.manifest.run_id) == (500, "run-a")
    assert checkpoint.manifest.config_hash == "c0"
    assert checkpoint.state["best"] == {"step": 250, "loss": 1.0 / 3.0}
    assert checkpoint.read("config.toml") == b'name = "x"\n'
    with pytest.raises(CorruptError, match=r"no tensors 'extra'; it has: model, optimizer"):
        checkpoint.tensors("extra")
    with pytest.raises(CorruptError, match=r"no file 'vocab.json'"):
        checkpoint.read("vocab.json")


def test_changing_a_loaded_tensor_leaves_the_file_alone(store, save):
    save(store, 1)
    store.latest().tensors("model")["a.weight"].zero_()
    assert store.latest().tensors("model")["a.weight"].any()


def test_latest_takes_the_highest_step_whatever_the_times_say(store, save):
    assert store.latest() is None
    for step in (9, 100000000, 20):
        save(store, step)
    os.utime(store.folder / "step-00000009", (2e9, 2e9))
    assert store.latest().step == 100000000


def test_latest_ignores_unfinished_folders_files_links_and_other_runs(store, save, tmp_path):
    saved = save(store, 10)
    other = CheckpointStore(store.folder, run_id="run-b", config_hash="c0")
    save(other, 30)
    shutil.copytree(saved.path, store.folder / ("step-00000040.tmp-" + "0" * 32))
    (store.folder / "step-00000050").write_text("not a folder")
    shutil.copytree(saved.path, tmp_path / "elsewhere")
    (store.folder / "step-00000060").symlink_to(tmp_path / "elsewhere")
    assert store.latest().step == 10
    assert other.latest().step == 30
    assert CheckpointStore(store.folder, run_id="run-c", config_hash="c0").latest() is None
    assert store.warnings == []


def test_another_runs_checkpoint_is_not_overwritten(store, save):
    save(store, 10)
    other = CheckpointStore(store.folder, run_id="run-b", config_hash="c0")
    with pytest.raises(ConfigError, match=r"belongs to run run-a"):
        save(other, 10)
    assert store.latest().step == 10


def test_saving_a_step_again_replaces_it(store, save):
    save(store, 10)
    store.save(Contents(10, {"model": {"x": torch.ones(2)}}, {"step": 10}, {}))
    assert names(store) == ["step-00000010"]
    assert list(store.latest().tensors("model")) == ["x"]


def test_saving_over_a_damaged_checkpoint_of_the_step_replaces_it(store, save):
    saved = save(store, 10)
    (saved.path / "manifest.json").unlink()
    save(store, 10)
    assert names(store) == ["step-00000010"]
    assert store.latest().step == 10


def test_a_replaced_checkpoint_counts_until_its_successor_stands(store, save):
    saved = save(store, 10)
    saved.path.rename(saved.path.with_name("step-00000010.replaced"))
    assert store.latest().step == 10
    assert store.clean() == []
    assert names(store) == ["step-00000010"]
    shutil.copytree(saved.path, saved.path.with_name("step-00000010.replaced"))
    assert store.latest().path.name == "step-00000010"
    assert store.clean() == ["step-00000010.replaced"]


def test_clean_removes_unfinished_saves_and_nothing_else(store, save):
    save(store, 10)
    unfinished = "step-00000020.tmp-" + "0123456789abcdef" * 2
    (store.folder / unfinished / "deep").mkdir(parents=True)
    keep = ["notes", "step-00000030.tmp-mine", "x.tmp-" + "0" * 32, "step-00000040"]
    for name in keep:
        (store.folder / name).mkdir()
    assert store.clean() == [unfinished]
    assert names(store) == sorted([*keep, "step-00000010"])


@pytest.mark.parametrize("kind", ["dangling link", "link to a folder", "file"])
def test_clean_removes_what_bears_an_unfinished_saves_name(store, save, tmp_path, kind):
    saved = save(store, 10)
    elsewhere = tmp_path / "elsewhere"
    left = store.folder / f"step-00000020.tmp-{'0' * 32}"
    if kind == "file":
        left.write_text("half")
    else:
        left.symlink_to(elsewhere)
    if kind == "link to a folder":
        shutil.copytree(saved.path, elsewhere)
    assert store.clean() == [left.name]
    assert names(store) == ["step-00000010"]
    assert elsewhere.exists() == (kind == "link to a folder")


def test_what_follows_a_step_is_discarded_only_where_that_step_is_whole(store, save):
    for step in (1, 2, 3, 4):
        save(store, step)
    save(CheckpointStore(store.folder, run_id="run-b", config_hash="c0"), 100)
    assert store.discard_after(9) == []
    assert store.discard_after(2) == [4, 3]
    (store.folder / "step-00000001" / "model.safetensors").unlink()
    assert store.discard_after(1) == []
    assert names(store) == [f"step-{step:08d}" for step in (1, 2, 100)]


def test_prune_keeps_the_newest_and_the_named(store, save):
    for step in range(1, 8):
        save(store, step)
    save(CheckpointStore(store.folder, run_id="run-b", config_hash="c0"), 100)
    (store.folder / "step-00000000").mkdir()  # nobody's
    assert store.prune(2, {3, 6}) == [5, 4, 2, 1]
    assert store.prune(2, {3, 6}) == []
    expected = ["step-00000000", *(f"step-{step:08d}" for step in (3, 6, 7, 100))]
    assert names(store) == expected


def test_prune_counts_what_a_save_replaced_as_no_checkpoint_more(store, save):
    for step in (1, 2):
        save(store, step)
    newest = store.folder / "step-00000002"
    shutil.copytree(newest, newest.with_name(newest.name + ".replaced"))
    assert store.prune(2) == []
    assert "step-00000001" in names(store)


def test_a_large_checkpoint_may_be_pruned_while_it_is_read(store, save, monkeypatch):
    for step in (1, 2):
        save(store, step)
    monkeypatch.setattr(opening, "_PATIENCE_SECONDS", -1)  # over, once the first was read

    def check(path, manifest):
        if manifest.step == 2:
            shutil.rmtree(path)
        opening.check_content(path, manifest)

    assert opening.find_checkpoint(store.folder, [], check=check).step == 1


def test_nothing_is_committed_that_does_not_read_back(store, save, monkeypatch):
    save(store, 1)
    write = os.write

    def bad_disk(fd, data):
        damaged = bytes(data)[:-1] + bytes([bytes(data)[-1] ^ 1])
        return write(fd, damaged)

    monkeypatch.setattr(os, "write", bad_disk)
    with pytest.raises(StorageError, match=r"does not read back: .*model\.safetensors"):
        save(store, 2)
    monkeypatch.undo()
    assert names(store) == ["step-00000001"]
    assert store.latest().step == 1


def test_what_was_read_back_when_it_was_saved_is_not_read_again_to_prune(store, save, monkeypatch):
    """The main process would read the files of all, and the others wait."""
    for step in (1, 2):
        save(store, step)
    monkeypatch.setattr(
        "pentameter.disk.atomic.check_file",
        lambda folder, record, hash_content: (
            pytest.fail(f"read again: {folder}") if hash_content else None
        ),
    )
    assert store.prune(1) == [1]


def test_prune_never_counts_a_damaged_checkpoint_as_kept(store, save):
    for step in range(1, 5):
        save(store, step)
    store = CheckpointStore(store.folder, run_id=store.run_id, config_hash=store.config_hash)
    path = store.folder / "step-00000004" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert store.prune(1) == [2, 1]
    assert store.latest().step == 3
    assert "step-00000004" in store.warnings[0]
    # nothing older than the last whole one is left to remove when none is whole
    path = store.folder / "step-00000003" / "state.json"
    path.unlink()
    assert store.prune(1) == []


def test_what_cannot_be_saved_is_refused_before_anything_is_written(store):
    with pytest.raises(TypeError, match=r"'w'.*meta"):
        store.save(Contents(1, {"model": {"w": torch.empty(1, device="meta")}}, {}, {}))
    with pytest.raises(TypeError, match=r"'w'.*sparse"):
        store.save(Contents(1, {"model": {"w": torch.eye(2).to_sparse()}}, {}, {}))
    with pytest.raises(ValueError, match=r"JSON"):
        store.save(Contents(1, {}, {"loss": float("nan")}, {}))
    for name in ("../x", "/x", "manifest.json", "state.json", "a/b", ".hidden", ""):
        with pytest.raises(ValueError, match=r"cannot hold"):
            store.save(Contents(1, {}, {}, {name: b""}))
    assert not store.folder.exists()


@pytest.mark.parametrize("name", ["__metadata__", "heads.\ud800"])
def test_a_name_that_no_reader_takes_is_refused_before_anything_is_written(store, name):
    with pytest.raises(TypeError, match="no reader takes that name"):
        store.save(Contents(1, {"model": {name: torch.ones(1)}}, {"step": 1}, {}))
    assert not store.folder.exists()


def test_free_space_is_checked_before_the_save(store, save, monkeypatch):
    save(store, 1)
    full = os.statvfs_result((4096, 4096, 10**6, 10, 10, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(StorageError, match=r"40,960 bytes are free; free some space") as caught:
        save(store, 2)
    assert caught.value.exit_code == 74
    assert names(store) == ["step-00000001"]


def test_a_disk_with_room_for_the_warned_bytes_has_room_for_the_save(store, monkeypatch):
    state = Contents(1, {"model": {"w": torch.ones(256)}}, {"step": 1}, {})
    asked = []
    monkeypatch.setattr(
        "pentameter.checkpoint.folders.store.check_free_space",
        lambda folder, n_bytes: asked.append(n_bytes),
    )
    store.save(state)
    assert 1024 < asked[0] < 2048  # what `check_free_space` adds is counted once


def test_the_manifest_is_plain_json_with_every_file(store, save):
    saved = save(store, 5)
    manifest = json.loads((saved.path / "manifest.json").read_text())
    assert set(manifest["files"]) == {
        "config.toml", "model.safetensors", "optimizer.safetensors", "state.json"
    }  # fmt: skip
    assert manifest["step"] == 5
    assert manifest["format_version"] == 1


def test_a_renamed_copy_of_a_checkpoint_opens(store, save, tmp_path):
    saved = save(store, 5)
    shutil.copytree(saved.path, tmp_path / "my-model")
    (tmp_path / "best").symlink_to(tmp_path / "my-model")
    assert open_checkpoint(tmp_path / "best").step == 5
    with pytest.raises(ConfigError, match=r"not a folder"):
        open_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize("is_there", [True, False], ids=["moved", "dangling"])
def test_a_link_in_the_place_of_a_checkpoint_gives_way_and_leaves_nothing(
    store, save, tmp_path, is_there
):
    saved = save(store, 5)
    elsewhere, files = tmp_path / "elsewhere", sorted(os.listdir(saved.path))
    saved.path.rename(elsewhere)
    saved.path.symlink_to(elsewhere if is_there else tmp_path / "gone")
    save(store, 5)
    assert names(store) == ["step-00000005"]
    assert not saved.path.is_symlink()
    assert sorted(os.listdir(elsewhere)) == files  # which are not ours to remove


def test_a_dangling_link_of_a_removal_goes_at_the_next_start(store, save, tmp_path):
    saved = save(store, 5)
    left = saved.path.with_name(temporary_name(saved.path.name))
    left.symlink_to(tmp_path / "gone")
    assert store.clean() == [left.name]
    assert names(store) == ["step-00000005"]


def test_damage_at_another_step_is_none_at_this_one(store, save):
    for step in (1, 2, 3):
        save(store, step)
    (store.folder / "step-00000003" / "manifest.json").write_bytes(b"{}")
    assert store.at(2).step == 2
    assert store.at(5) is None
    with pytest.raises(CorruptError, match=r"the checkpoint at step 3 is damaged: .*manifest"):
        store.at(3)
    assert store.warnings == []


def test_what_a_dead_process_left_and_nobody_can_remove_only_warns(store, save, monkeypatch):
    save(store, 1)
    left = store.folder / f"step-00000002.tmp-{'0' * 32}"
    left.mkdir()
    obsolete = store.folder / "step-00000001.replaced"
    shutil.copytree(store.folder / "step-00000001", obsolete)

    def refuse(path, *arguments, **options):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert store.clean() == [left.name, obsolete.name]
    assert len(store.warnings) == 2
    assert all("what is left of a checkpoint stays: cannot remove" in w for w in store.warnings)
    assert store.latest().step == 1
    save(store, 1)  # again
    assert store.latest().step == 1


def test_only_what_decides_a_removal_is_hashed(store, save, monkeypatch):
    for step in (1, 2, 3):
        save(store, step)
    again = CheckpointStore(store.folder, run_id=store.run_id, config_hash="")
    hashed = []
    check_file = atomic.check_file

    def counted(folder, record, *, hash_content, **options):
        if hash_content:
            hashed.append(folder.name)
        check_file(folder, record, hash_content=hash_content, **options)

    monkeypatch.setattr(atomic, "check_file", counted)
    assert again.latest().step == 3
    assert {*hashed} == {"step-00000003"}
    hashed.clear()
    assert again.prune(3) == again.prune(1, keep_steps=[1, 2]) == []
    assert again.prune(1) == [2, 1]
    assert not hashed
