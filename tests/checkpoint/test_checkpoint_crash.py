"""Saves that die, or fail, before each single file-system operation."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.save_phases import Contents, HostBuffers
from pentameter.disk.atomic import write_atomic
from pentameter.errors import StorageError
from trials.faults.file_operations import CHANGES, DieAt, before_each


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """A killed process loses nothing that it wrote, so these tests need no real syncs."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def dies_at(n: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child killed before its n-th operation, or in the middle of it if a write.

    Whether it got there.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with before_each(DieAt(n)):
                work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the work failed of itself"
    return False


def fresh(store: CheckpointStore) -> CheckpointStore:
    """As the next process sees it."""
    return CheckpointStore(store.folder, run_id=store.run_id, config_hash=store.config_hash)


def content(checkpoint) -> dict[str, float]:
    return {
        name: float(value.double().sum()) for name, value in checkpoint.tensors("model").items()
    }


def save_mark(store: CheckpointStore, step: int, mark: float, how: str = "waited for") -> None:
    tensors = {
        "model": {"w": torch.full((3, 5), mark), "b": torch.full((2,), mark).bfloat16()},
        "optimizer": {"w.step": torch.tensor(step)},
    }
    save = store.plan(
        Contents(step, tensors, {"step": step, "mark": mark}, {"config.toml": b"seed = 1\n"})
    )
    if how == "beside training":
        save.start_writing(HostBuffers())
        for tensor in (*tensors["model"].values(), *tensors["optimizer"].values()):
            tensor.fill_(-1)  # the next step
    store.commit(save)


HOW = pytest.mark.parametrize("how", ["waited for", "beside training"])


@HOW
@pytest.mark.parametrize("scene", ["first", "next", "next and prune", "again", "again after crash"])
def test_a_kill_before_any_operation_leaves_a_whole_checkpoint(tmp_path, scene, how):
    n = 0
    arrived = True
    while arrived:
        n += 1
        store = CheckpointStore(tmp_path / str(n) / "checkpoints", run_id="r", config_hash="c")
        before = {"first": None}.get(scene, (1, 1.0))
        after = (1, 2.0) if scene in ("first", "again", "again after crash") else (2, 2.0)
        if scene == "next and prune":
            save_mark(store, 0, 0.5)
        if before is not None:
            save_mark(store, *before)
        if scene == "again after crash":
            path = store.folder / "step-00000001"
            path.rename(path.with_name("step-00000001.replaced"))

        def work(store=store, after=after):
            save_mark(store, *after, how)
            if scene == "next and prune":
                store.prune(1)

        arrived = dies_at(n, work)

        def found(store=store):
            checkpoint = fresh(store).latest()
            if checkpoint is None:
                return None
            assert content(checkpoint)["w"] == 15 * checkpoint.state["mark"]
            return checkpoint.step, checkpoint.state["mark"]

        assert found() in ((before, after) if arrived else (after,))
        # the next start: cleaned, as it was, and able to save
        standing = found()
        next_store = fresh(store)
        next_store.clean()
        assert found() == standing
        if store.folder.exists():
            assert all(name[5:].isdigit() for name in os.listdir(store.folder))
        save_mark(next_store, *after)
        next_store.prune(1)
        assert found() == after
        assert os.listdir(store.folder) == [f"step-{after[0]:08d}"]
        assert next_store.warnings == []
    assert n > 30


@pytest.mark.parametrize(
    "kind", ["once EIO", "once ENOSPC", "from then on EROFS", "from then on EIO"]
)
@pytest.mark.parametrize("scene", ["next", "again"])
@HOW
def test_a_failing_operation_leaves_the_previous_checkpoint_whole(tmp_path, scene, kind, how):
    number = getattr(errno, kind.split()[-1])
    n_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    n = n_failed = 0
    arrived = True
    while arrived:
        n += 1
        store = CheckpointStore(tmp_path / str(n) / "checkpoints", run_id="r", config_hash="c")
        save_mark(store, 1, 1.0)
        n_seen = 0

        def act(name, arguments, n=n):
            nonlocal n_seen
            if name in CHANGES or number == errno.EIO:
                n_seen += 1
                if n_seen == n or (n_seen > n and "from then on" in kind):
                    raise OSError(number, os.strerror(number))

        failure = None
        try:
            with before_each(act):
                save_mark(store, 2 if scene == "next" else 1, 2.0, how)
        except StorageError as error:
            failure = error
        if failure is not None:
            n_failed += 1
            assert str(tmp_path) in str(failure)
            assert os.strerror(number) in str(failure)
        arrived = n_seen >= n
        checkpoint = fresh(store).latest()
        assert checkpoint.state["mark"] in (1.0, 2.0)
        assert content(checkpoint)["w"] == 15 * checkpoint.state["mark"]
        if "once" in kind and failure is not None:
            assert not any(".tmp-" in name for name in os.listdir(store.folder))
    assert n_failed > 15
    if n_open:
        assert len(os.listdir("/proc/self/fd")) <= n_open + 1


def test_pruning_that_fails_leaves_whole_checkpoints(tmp_path):
    n = 0
    arrived = True
    while arrived:
        n += 1
        store = CheckpointStore(tmp_path / str(n), run_id="r", config_hash="c")
        for step in (1, 2):
            save_mark(store, step, 1.0)
        n_seen = 0

        def act(name, arguments, n=n):
            nonlocal n_seen
            n_seen += 1
            if n_seen == n:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        with suppress(StorageError), before_each(act):
            store.prune(1)
        arrived = n_seen >= n
        assert fresh(store).latest().step == 2
        store.clean()
        assert all(".tmp-" not in name for name in os.listdir(store.folder))


def test_everything_is_synced_before_its_name_and_removed_after(tmp_path):
    """What a power loss may drop: each write must be synced before what relies on it."""
    store = CheckpointStore(tmp_path / "new" / "checkpoints", run_id="r", config_hash="c")
    log: list[tuple[str, str]] = []

    def act(name, arguments):
        if name in ("write", "fsync"):
            log.append((name, os.path.basename(os.readlink(f"/proc/self/fd/{arguments[0]}"))))
        elif name == "rename":
            log.append((name, os.path.basename(arguments[1])))
        elif name != "close":
            log.append((name, os.path.basename(arguments[0])))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    with before_each(act):
        save_mark(store, 1, 1.0)
    assert log.index(("mkdir", "new")) < log.index(("fsync", tmp_path.name))
    assert log.index(("mkdir", "checkpoints")) < log.index(("fsync", "new"))
    temporary = next(name for what, name in log if what == "mkdir" and ".tmp-" in name)
    commit = log.index(("rename", "step-00000001"))
    manifest = log.index(("write", "manifest.json"))
    for name in ("state.json", "config.toml", "model.safetensors", "optimizer.safetensors"):
        last_write = max(i for i, entry in enumerate(log) if entry == ("write", name))
        assert last_write < log.index(("fsync", name)) < manifest
    assert manifest < log.index(("fsync", "manifest.json")) < log.index(("fsync", temporary))
    assert log.index(("fsync", temporary)) < commit < log.index(("fsync", "checkpoints"))

    log.clear()
    with before_each(act):
        save_mark(store, 1, 2.0)  # the same step again: the old one goes last
    commit = log.index(("rename", "step-00000001"))
    removal = next(i for i, (what, _) in enumerate(log) if what in ("unlink", "rmdir"))
    synced = max(i for i, entry in enumerate(log) if entry == ("fsync", "checkpoints"))
    assert commit < synced < removal


def test_an_atomic_write_is_old_or_new_at_every_kill(tmp_path):
    path = tmp_path / "file"
    n = 0
    arrived = True
    while arrived:
        n += 1
        path.write_bytes(b"old")
        arrived = dies_at(n, lambda: write_atomic(path, b"brand new"))
        assert path.read_bytes() in ((b"old", b"brand new") if arrived else (b"brand new",))
    assert n > 5


def test_an_atomic_write_that_fails_names_the_file_and_leaves_no_trace(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def act(name, arguments):
        if name == "fsync":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        pytest.raises(StorageError, match=r"file.*No space left.*free some space"),
        before_each(act),
    ):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(StorageError, match=r"removed or unmounted"):
        write_atomic(tmp_path / "gone" / "file", b"new")


def test_a_file_size_limit_is_a_storage_error(store, save):
    import resource

    save(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(StorageError, match=r"ulimit"):
            store.save(Contents(2, {"model": {"w": torch.zeros(10_000)}}, {"step": 2}, {}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(store.folder) == ["step-00000001"]


def test_an_interrupt_in_the_middle_of_a_save_cleans_up(store, save):
    save(store, 1)

    def act(name, arguments):
        if name == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), before_each(act):
        save(store, 2)
    assert os.listdir(store.folder) == ["step-00000001"]


def test_a_reader_beside_a_saving_run_always_finds_a_whole_checkpoint(store):
    from pentameter.checkpoint.folders.opening import find_model

    save_mark(store, 1, 1.0)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for step in range(2, 120):
                save_mark(store, step, float(step))
                time.sleep(0.002)  # even so, far more often than any run saves
                store.prune(1)
            status = 0
        finally:
            os._exit(status)
    steps = set()
    done = 0
    while not done:
        done, status = os.waitpid(pid, os.WNOHANG)
        warnings: list[str] = []
        steps.add(find_model(store.folder.parent, warnings).step)
        assert warnings == []
    assert status == 0
    assert len(steps) > 1
    assert max(steps) == 119
