"""Copies in an object store: stopped before each request, a whole one can be restored."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from pentameter.checkpoint.folders.remote_copies import (
    RemoteCopies,
    fetch_checkpoint,
    parse_copy,
    read_run_file,
)
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.disk import remote_folder
from pentameter.disk.remote_folder import RemoteFolder
from pentameter.errors import ConfigError, CorruptError, StorageError
from trials.faults.object_store import emptied, running_store

URL = "s3://bucket/run"
BEFORE, AFTER = "before it is done", "after it is done"


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """A stopped process loses nothing that it wrote, so these tests need no real syncs."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="module")
def one_store():
    with running_store() as store:
        yield store


@pytest.fixture
def store(one_store, monkeypatch):
    monkeypatch.setattr(remote_folder, "START_PAUSES", (0.0,) * 3)
    with emptied(one_store):
        yield one_store


def run_folder(path, run_id="r"):
    return CheckpointStore(path / "checkpoints", run_id=run_id, config_hash="c")


def saved(checkpoints, step, mark=None):
    """Save a checkpoint whose weights are all `mark`, by default its step."""
    mark = float(step if mark is None else mark)
    tensors = {
        "model": {"w": torch.full((3, 5), mark)},
        "optimizer": {"w.exp_avg": torch.full((3, 5), -mark)},
    }
    return checkpoints.save(
        Contents(step, tensors, {"step": step}, {"config.toml": b"seed = 1\n"})
    ).path


def copies(url=URL):
    """The copies, as the next process sees them."""
    found = RemoteCopies(RemoteFolder(url), [])
    found.read()
    return found


def add(remote, path, needs=(), keep_last=1, run_id="r"):
    files = {"metrics.jsonl": f"of {path.name}\n".encode(), "log.txt": b""}
    return remote.add(path, lambda: files, run_id=run_id, needs=needs, keep_last=keep_last)


def restored(path, remote=None):
    """The newest copy, brought to a machine that has nothing: its step and mark."""
    remote = remote or copies()
    if not remote.copies:
        return None
    copy = remote.copies[max(remote.copies)]
    checkpoints = run_folder(path)
    fetch_checkpoint(remote.folder, copy, checkpoints, lambda n_bytes: None)
    assert read_run_file(remote.folder, copy, "metrics.jsonl").startswith(b"of step-")
    assert read_run_file(remote.folder, copy, "log.txt") == b""
    checkpoint = checkpoints.latest()
    tensor = checkpoint.tensors("model")["w"]
    return checkpoint.step, float(tensor[0, 0])


def test_a_copy_is_the_checkpoint_and_the_run(store, tmp_path):
    path = saved(run_folder(tmp_path / "a"), 5)
    remote = copies()
    assert remote.copies == {}
    n_bytes = add(remote, path)
    assert n_bytes == sum(len(each) for key, each in store.objects.items() if key.count("/") > 2)
    assert add(remote, path) == 0  # it is there
    assert restored(tmp_path / "b") == (5, 5.0)
    for name in (each.name for each in path.iterdir()):
        copied = tmp_path / "b" / "checkpoints" / "step-00000005" / name
        assert copied.read_bytes() == (path / name).read_bytes()
    n_before = len(store.requests)
    assert restored(tmp_path / "b") == (5, 5.0)  # a whole one is not fetched again
    assert len([r for r in store.requests[n_before:] if "safetensors" in r.key]) == 0


class _Stopped(BaseException):
    """The process ends here."""


REQUESTS = ("cat_file", "pipe_file", "put_file", "rm_file", "find")


def stopping(remote, number, when):
    """Have the process of `remote` end before, or just after, its n-th request from now on."""
    n_made = 0

    def counted(request):
        def ask(*arguments, **options):
            nonlocal n_made
            n_made += 1
            if n_made == number and when == BEFORE:
                raise _Stopped
            answer = request(*arguments, **options)
            if n_made == number:
                raise _Stopped
            return answer

        return ask

    for name in REQUESTS:
        setattr(remote.folder._fs, name, counted(getattr(remote.folder._fs, name)))


SCENES = ["first", "next", "next and prune", "again", "after one that was stopped"]


@pytest.mark.parametrize("when", [BEFORE, pytest.param(AFTER, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scene", SCENES)
def test_stopped_at_any_request_a_whole_copy_is_there(tmp_path, monkeypatch, scene, when):
    url, is_done, number = "memory://bucket/run", False, 0
    checkpoints = run_folder(tmp_path / "run")
    old, keep_last = saved(checkpoints, 1), 1 if scene == "next and prune" else 2
    before, after = (1, 1.0), (2, 2.0)
    if scene == "first":
        before, after = None, (1, 1.0)
    elif scene == "again":
        kept = tmp_path / "before" / old.name
        shutil.copytree(old, kept)
        old, after = kept, (1, 9.0)
    new = saved(checkpoints, *after)
    while not is_done:
        number += 1
        MemoryFileSystem.store.clear()
        remote = copies(url)
        if before is not None:
            add(remote, old)
        if scene == "after one that was stopped":
            stopping(remote, 9, BEFORE)
            with pytest.raises(_Stopped):
                add(remote, new)
        remote = copies(url)
        stopping(remote, number, when)
        try:
            add(remote, new, keep_last=keep_last)
            is_done = True
        except _Stopped:
            pass
        manifest = f"/bucket/run/step-{after[0]:08d}/manifest.json"
        is_published = scene != "again" and manifest in MemoryFileSystem.store
        remote = copies(url)
        with monkeypatch.context() as patch:  # a listing that shows nothing new
            patch.setattr(MemoryFileSystem, "find", lambda *arguments, **options: [])
            for each in (remote, copies(url)):
                found = restored(tmp_path / f"machine {number} {each is remote}", each)
                assert found in (before, after), sorted(MemoryFileSystem.store)
                assert found == after or not (is_done or is_published)
        add(remote, new, keep_last=keep_last)  # the next process makes up for it
        assert restored(tmp_path / f"afterwards {number}", remote) == after
        named = {key for copy in remote.copies.values() for key in copy.names}
        named |= {"run.json", *(f"step-{step:08d}/manifest.json" for step in remote.copies)}
        found = {key.removeprefix("/bucket/run/") for key in MemoryFileSystem.store}
        assert found == named  # and cleans up
    assert number > 20


def test_the_newest_stay_and_what_they_need(store, tmp_path):
    checkpoints, remote = run_folder(tmp_path), copies()
    for step in range(1, 6):
        add(remote, saved(checkpoints, step), needs=(1,) if step > 1 else (), keep_last=2)
        assert sorted(remote.copies) == sorted({1, max(1, step - 1), step})
    remote.discard_after(4)
    assert sorted(copies().copies) == [1, 4]
    remote.discard_after(0)  # none would be left
    assert sorted(copies().copies) == [1, 4]


def test_nothing_is_removed_before_the_newer_one_reads_back(store, tmp_path):
    checkpoints, remote = run_folder(tmp_path), copies()
    add(remote, saved(checkpoints, 1))
    store.fault = lambda r: "truncate" if r.what == "PUT" and "optimizer" in r.key else None
    with pytest.raises(StorageError, match=r"cannot write .*optimizer"):
        add(remote, saved(checkpoints, 2))
    store.fault = lambda request: None
    assert restored(tmp_path / "b") == (1, 1.0)
    assert not any(r.what == "DELETE" and "step-00000001" in r.key for r in store.requests)


@pytest.mark.parametrize("is_dead", [False, True], ids=["one object", "everything"])
def test_a_copy_that_fails_leaves_nothing(store, tmp_path, is_dead):
    checkpoints, remote = run_folder(tmp_path), copies()
    add(remote, saved(checkpoints, 1))
    before = {*store.objects}
    failed = []

    def fail(request):
        if request.what == "PUT" and "optimizer" in request.key:
            failed.append(request)
        return "503" if request in failed or (is_dead and failed) else None

    store.fault = fail
    with pytest.raises(StorageError, match=r"cannot write .*optimizer"):
        add(remote, saved(checkpoints, 2))
    if not is_dead:
        assert {*store.objects} == before
    store.fault = lambda request: None
    add(remote, saved(checkpoints, 3), keep_last=2)  # what could not be removed then is removed
    assert not [key for key in store.objects if "step-00000002" in key]
    assert restored(tmp_path / "b") == (3, 3.0)


def test_a_manifest_that_is_written_though_the_store_denies_it_keeps_its_objects(store, tmp_path):
    checkpoints, remote = run_folder(tmp_path), copies()
    add(remote, saved(checkpoints, 1))

    def deny(request):
        is_manifest = request.key == "run/step-00000002/manifest.json"
        return {"PUT": "500 after", "GET": "500"}.get(request.what) if is_manifest else None

    store.fault = deny
    with pytest.raises(StorageError, match=r"cannot write .*manifest"):
        add(remote, saved(checkpoints, 2), keep_last=3)
    store.fault = lambda request: None
    assert restored(tmp_path / "b") == (2, 2.0)
    add(remote, saved(checkpoints, 3), keep_last=3)
    assert restored(tmp_path / "c", copies()) == (3, 3.0)
    assert sorted(copies().copies) == [1, 2, 3]


@pytest.mark.parametrize("damage", ["removed", "cut", "flipped", "swapped"])
def test_damage_is_found(store, tmp_path, damage):
    checkpoints, remote = run_folder(tmp_path), copies()
    add(remote, saved(checkpoints, 1))
    (key,) = [key for key in store.objects if key.endswith("/model.safetensors")]
    body = store.objects.pop(key)
    if damage != "removed":
        other = bytes([body[0] ^ 1]) + body[1:]
        store.objects[key] = {"cut": body[:-1], "flipped": other, "swapped": body[::-1]}[damage]
    with pytest.raises(CorruptError, match=r"s3://bucket/run/step-00000001/.* is damaged"):
        restored(tmp_path / "b")
    assert not [*(tmp_path / "b").rglob("step-*")]


@pytest.mark.parametrize("name", ["step-00000001/manifest.json", "run.json"])
def test_a_damaged_manifest_is_no_copy(store, tmp_path, name):
    checkpoints, remote = run_folder(tmp_path), copies()
    for step in (1, 2):
        add(remote, saved(checkpoints, step), keep_last=2)
    for damage in (b"{}", b"\xff", store.objects[f"run/{name}"][:-9]):
        store.objects[f"run/{name}"] = damage
        found = copies()
        assert sorted(found.copies) == ([1, 2] if name == "run.json" else [2])
        assert found._warnings
        assert restored(tmp_path / "b", found) == (2, 2.0)


def test_what_arrives_wrong_may_be_stored_right(store, tmp_path):
    add(copies(), saved(run_folder(tmp_path / "a"), 1))
    n_asked = {}

    def flip(request):
        n_asked[request.key] = n_asked.get(request.key, 0) + 1
        return "flip" if request.what == "GET" and n_asked[request.key] < 3 else None

    store.fault = flip
    assert restored(tmp_path / "b") == (1, 1.0)
    n_asked.clear()
    remote = copies()
    add(remote, saved(run_folder(tmp_path / "a"), 2), keep_last=2)
    assert restored(tmp_path / "c") == (2, 2.0)


def test_a_copy_whose_manifest_cannot_be_read_is_not_removed(store, tmp_path):
    checkpoints = run_folder(tmp_path / "a")
    add(copies(), saved(checkpoints, 2))
    whole = dict(store.objects)
    store.objects["run/step-00000002/manifest.json"] = b"{}"
    store.objects["run/run.json"] = b"{}"
    add(copies(), saved(checkpoints, 1))
    assert whole.keys() <= store.objects.keys()


def test_names_that_lead_elsewhere_are_refused(store, tmp_path):
    add(copies(), saved(run_folder(tmp_path), 1))
    content = json.loads(store.objects["run/step-00000001/manifest.json"])
    content["checkpoint"]["../../evil"] = content["checkpoint"]["state.json"]
    with pytest.raises(CorruptError, match="could lead out of the folder"):
        parse_copy(json.dumps(content).encode(), "here", 1)


def test_a_run_never_starts_from_nothing_beside_copies_that_do_not_answer(store, tmp_path):
    add(copies(), saved(run_folder(tmp_path), 1))
    store.fault = lambda r: "404" if "manifest" in r.key else "stale" if r.what == "LIST" else None
    with pytest.raises(StorageError, match="names copies of step 1 and others, and none is there"):
        copies()
    store.fault = lambda r: "503"
    with pytest.raises(
        StorageError, match=r"cannot read s3://bucket/run/run.json after 4 attempts"
    ):
        copies()
    store.fault = lambda request: None
    store.objects["run/step-00000001/manifest.json"] = b"{}"
    with pytest.raises(CorruptError, match="every copy in s3://bucket/run is damaged"):
        copies()


def test_another_run_is_refused(store, tmp_path):
    add(copies(), saved(run_folder(tmp_path / "a"), 1))
    other = saved(run_folder(tmp_path / "b", "other"), 1)
    with pytest.raises(ConfigError, match="holds copies of run r, and this is run other"):
        add(copies(), other, run_id="other")
    assert restored(tmp_path / "c") == (1, 1.0)


def test_of_two_processes_the_later_one_copies(store, tmp_path):
    checkpoints = run_folder(tmp_path)
    first = copies()
    add(first, saved(checkpoints, 1))
    second = copies()
    second.claim("r")
    with pytest.raises(StorageError, match=r"process \d+ on .* copies run r to .* end one"):
        add(first, saved(checkpoints, 2), keep_last=2)
    add(second, saved(checkpoints, 3), keep_last=2)
    assert restored(tmp_path / "b") == (3, 3.0)


def test_an_old_answer_about_the_owner_is_no_other_process(store, tmp_path):
    checkpoints, old = run_folder(tmp_path), copies()
    add(old, saved(checkpoints, 1))
    before = store.objects["run/run.json"]
    remote = copies()
    remote.claim("r")
    store.objects["run/run.json"] = before  # as an eventually consistent store may answer
    add(remote, saved(checkpoints, 2))
    assert restored(tmp_path / "b") == (2, 2.0)
