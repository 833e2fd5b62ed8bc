"""Copies of checkpoints elsewhere: a new machine goes on from them, and failures are told."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pydantic import ValidationError
from tiny_runs import config, events, fit, hashes, recorded

from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.manifest import MANIFEST_NAME
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.disk import remote_folder
from pentameter.errors import ConfigError, CorruptError, InterruptedRunError, StorageError
from pentameter.train.keep import copying, restoring
from pentameter.train.loop import Trainer

URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def _empty_store(monkeypatch):
    """An empty bucket, and no waiting for one that fails."""
    monkeypatch.setattr(remote_folder, "START_PAUSES", (0.0,))
    monkeypatch.setattr(copying, "PAUSES", (0.0,))
    MemoryFileSystem.store.clear()


def sections(steps=12, **checkpoint):
    """A run with a constant rate, so that it can be of several lengths, that is copied."""
    return {
        "train": {"steps": steps, "sample_interval": 4, "sample_tokens": 4},
        "schedule": {"name": "constant"},
        "checkpoint": {"copy_to": URL, **checkpoint},
    }


class DiesAt:
    """The machine is gone at this step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, step):
        if step.step == self.step:
            raise RuntimeError("the machine is gone")


def copied_steps():
    manifests = [key for key in MemoryFileSystem.store if key.count("/") == 4]
    return sorted(int(key.split("/")[3][5:]) for key in manifests if key.endswith(MANIFEST_NAME))


@pytest.fixture
def patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def fail_writes(patch, *, after):
    """Have every write fail, after the first so many; `patch.undo` makes the store work again."""
    pipe, n_written = MemoryFileSystem.pipe_file, [0]

    def pipe_file(self, path, value, **options):
        n_written[0] += 1
        if n_written[0] > after:
            raise OSError("the store is out of order")
        return pipe(self, path, value, **options)

    patch.setattr(MemoryFileSystem, "pipe_file", pipe_file)


def test_a_new_machine_goes_on_as_if_nothing_had_happened(tmp_path):
    fit(tmp_path / "undisturbed", sections={**sections(), "checkpoint": {}})
    with pytest.raises(RuntimeError, match="the machine is gone"):
        fit(tmp_path / "gone", sections=sections(), hooks=[DiesAt(10)])
    assert copied_steps() == [4, 8]
    run, _ = fit(tmp_path / "new", sections=sections())
    assert run.folder.checkpoint.step == 8
    assert hashes(tmp_path / "new", 12) == hashes(tmp_path / "undisturbed", 12)
    for kind in ("train", "eval"):
        kept = [
            [e for e in recorded(tmp_path / name) if e["event"] == kind]
            for name in ("new", "undisturbed")
        ]
        assert kept[0] == kept[1]
    assert [e["step"] for e in events(tmp_path / "new", "checkpoint")] == [4, 8, 12]
    assert [e["event"] for e in events(tmp_path / "new")].count("resume") == 1
    samples = [sorted((tmp_path / name / "samples").iterdir()) for name in ("new", "undisturbed")]
    assert [each.read_bytes() for each in samples[0]] == [each.read_bytes() for each in samples[1]]
    assert [each.name for each in samples[0]] == [each.name for each in samples[1]]
    log = (tmp_path / "new" / "log.txt").read_text()
    assert "step  1/12" in log
    assert "step 12/12" in log


class Spoils:
    """Somebody edits a sample in another encoding, and puts a link and a pipe beside it."""

    def on_sample(self, run, sample):
        samples = run.run_dir / "samples"
        if sample.step == 4:
            (samples / "step-00000004.txt").write_bytes(b"caf\xe9")
            (samples / "step-00000002.txt").symlink_to(samples / "gone")
            os.mkfifo(samples / "step-00000003.txt")


def test_no_copy_fails_for_want_of_a_sample(tmp_path):
    fit(tmp_path / "run", sections=sections(8), hooks=[Spoils()])
    assert [e["error"] for e in events(tmp_path / "run", "copy")][-1] is None
    fit(tmp_path / "new", sections=sections(8))
    samples = sorted((tmp_path / "new" / "samples").iterdir())
    assert [int(each.stem[5:]) for each in samples] == [0, 4, 8]
    assert samples[1].read_text() == "caf\N{REPLACEMENT CHARACTER}"


def test_a_damaged_best_checkpoint_keeps_no_later_one_from_being_copied(tmp_path):
    run = tmp_path / "run"
    rising = {"optimizer": {"learning_rate": 0.3}, "train": {"steps": 16, "eval_interval": 8}}
    saved = {"interval": 2, "keep_last": 1}
    with pytest.raises(RuntimeError, match="the machine is gone"):
        fit(run, sections={**sections(), **rising, "checkpoint": saved}, hooks=[DiesAt(11)])
    best, _ = sorted((run / "checkpoints").iterdir())
    assert best.name == "step-00000008"
    content = bytearray((best / "model.safetensors").read_bytes())
    content[-100] ^= 1
    (best / "model.safetensors").write_bytes(content)
    fit(run, sections={**sections(**saved), **rising})
    assert [e["error"] for e in events(run, "copy")] == [None] * len(events(run, "copy"))
    assert 16 in copied_steps()
    assert (run / "log.txt").read_text().count("step 8 is not copied to memory://bucket/run: ") == 1


@pytest.mark.slow
def test_copies_are_of_what_the_run_keeps(tmp_path):
    run, _ = fit(tmp_path / "run", sections=sections(24, keep_last=1))
    kept = sorted(int(each.name[5:]) for each in (tmp_path / "run" / "checkpoints").iterdir())
    assert copied_steps() == kept
    made = events(tmp_path / "run", "copy")
    assert made[-1]["step"] == 24
    assert all(e["error"] is None and e["bytes"] > 50_000 for e in made)
    fit(tmp_path / "new", sections=sections(24, keep_last=1))  # complete: nothing is left to do
    restored = sorted(int(each.name[5:]) for each in (tmp_path / "new" / "checkpoints").iterdir())
    assert restored == kept
    assert run.state.best_step in restored
    assert events(tmp_path / "new", "copy")[-1]["step"] < 24
    assert [e["kind"] for e in events(tmp_path / "new", "end")] == ["completed"]


@pytest.mark.slow
def test_a_best_checkpoint_is_copied_before_what_needs_it(tmp_path, monkeypatch):
    """A copy that may return to its best one does not exist before that one does."""
    written = []
    pipe = MemoryFileSystem.pipe_file

    def pipe_file(self, path, value, **options):
        written.append(path)
        return pipe(self, path, value, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    add = copying.RemoteCopies.add

    def slow(self, path, *arguments, **options):
        time.sleep(0.3 if path.name.endswith("04") else 0)  # later ones are saved meanwhile
        return add(self, path, *arguments, **options)

    monkeypatch.setattr(copying.RemoteCopies, "add", slow)
    run, _ = fit(tmp_path / "run", sections=sections(28, keep_last=1))
    assert copied_steps() == sorted({run.state.best_step, 28})
    kept = sorted(int(each.name[5:]) for each in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == copied_steps()  # what had to stay while it was copied is gone


@pytest.mark.parametrize("on_error", ["stop", pytest.param("warn", marks=pytest.mark.slow)])
def test_a_failed_copy_stops_or_warns_as_asked(tmp_path, patch, on_error):
    fail_writes(patch, after=1)  # the claim is written
    told = r"step \d+ is not copied to memory://bucket/run: cannot write .* the store is out of"
    with pytest.raises(StorageError, match=told) as caught:
        fit(tmp_path, sections=sections(16, on_error=on_error, asynchronous=False))
    last = events(tmp_path, "train")[-1]["step"]
    assert last == (16 if on_error == "warn" else last)
    assert (last < 16) == (on_error == "stop")
    failed = events(tmp_path, "copy")
    assert failed
    assert all("is out of order" in e["error"] for e in failed)
    assert "The next copy makes up for it" in (tmp_path / "log.txt").read_text()
    if on_error == "stop":
        assert f"the last checkpoint is step {last}, where the same command goes on" in str(
            caught.value
        )
    patch.undo()
    fit(tmp_path, sections=sections(16, on_error=on_error))
    assert copied_steps()[-1] == 16


@pytest.mark.slow
def test_a_copy_that_failed_is_made_up_for(tmp_path, patch):
    fail_writes(patch, after=1)

    class Repairs:
        def on_step(self, trainer, step):
            if step.step == 10:
                patch.undo()

    run, _ = fit(tmp_path, sections=sections(on_error="warn"), hooks=[Repairs()])
    assert run.copies.failure is None
    assert copied_steps()[-1] == 12


@pytest.mark.slow
def test_an_older_run_folder_goes_on_from_the_newer_copy(tmp_path):
    for name, step in (("old", 6), ("gone", 10)):
        with pytest.raises(RuntimeError):
            fit(tmp_path / "run", sections=sections(), hooks=[DiesAt(step)])
        shutil.copytree(tmp_path / "run", tmp_path / name)
    run, _ = fit(tmp_path / "old", sections=sections())
    assert run.folder.checkpoint.step == 8
    assert [e["step"] for e in events(tmp_path / "old", "train")] == [*range(1, 13)]


@pytest.mark.slow
def test_a_damaged_run_folder_is_brought_back(tmp_path):
    with pytest.raises(RuntimeError):
        fit(tmp_path, sections=sections(), hooks=[DiesAt(10)])
    for path in tmp_path.glob("checkpoints/*/model.safetensors"):
        path.write_bytes(b"damaged")
    (tmp_path / "plan.json").write_text("{")
    run, _ = fit(tmp_path, sections=sections())
    assert run.folder.checkpoint.step == 8


@pytest.mark.parametrize("stage", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_kill_while_a_run_is_brought_back_only_costs_time(tmp_path, monkeypatch, stage):
    with pytest.raises(RuntimeError):
        fit(tmp_path / "gone", sections=sections(), hooks=[DiesAt(10)])
    write = restoring._write_run_files

    def killed(path, files):
        if stage == "after":
            write(path, {**files, "config.toml": b""})  # the last one is not there
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(restoring, "_write_run_files", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "new", sections=sections())
    assert not (tmp_path / "new" / "config.toml").exists()
    run, _ = fit(tmp_path / "new", sections=sections())
    assert run.folder.checkpoint.step == 8
    assert [e["step"] for e in events(tmp_path / "new", "train")] == [*range(1, 13)]


def test_a_damaged_copy_is_passed_over(tmp_path):
    with pytest.raises(RuntimeError):
        fit(tmp_path / "gone", sections=sections(), hooks=[DiesAt(10)])
    damaged = [key for key in MemoryFileSystem.store if key.endswith("model.safetensors")]
    del MemoryFileSystem.store[max(damaged)]
    run, _ = fit(tmp_path / "new", sections=sections())
    assert run.folder.checkpoint.step == 4
    MemoryFileSystem.store.clear()
    fit(tmp_path / "gone", sections=sections())
    for key in [key for key in MemoryFileSystem.store if key.endswith("model.safetensors")]:
        del MemoryFileSystem.store[key]
    with pytest.raises(CorruptError, match="every newer copy in memory://bucket/run is damaged"):
        fit(tmp_path / "other", sections=sections())


def test_a_store_that_does_not_answer(tmp_path, monkeypatch):
    def silent(self, path, **options):
        raise OSError("no route")

    with pytest.raises(RuntimeError):
        fit(tmp_path / "run", sections=sections(), hooks=[DiesAt(6)])
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", silent)
        for name, on_error in (("run", "stop"), ("new", "stop"), ("new", "warn")):
            with pytest.raises(StorageError, match=r"cannot read .*run.json .*no route"):
                fit(tmp_path / name, sections=sections(on_error=on_error))
        assert not (tmp_path / "new" / "config.toml").exists()  # nothing starts from nothing

        class Repairs:
            def on_step(self, trainer, step):
                patch.undo()

        hooks = [Repairs()]
        fit(tmp_path / "run", sections=sections(on_error="warn"), hooks=hooks)
    assert "Training goes on from the run folder" in (tmp_path / "run" / "log.txt").read_text()
    assert copied_steps()[-1] == 12


def test_a_signal_waits_for_copies_as_long_as_it_may(tmp_path, monkeypatch):
    put = MemoryFileSystem.put_file

    def slow(self, *arguments, **options):
        time.sleep(30)
        return put(self, *arguments, **options)

    class Signal:
        def on_step(self, trainer, step):
            if step.step == 6:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MemoryFileSystem, "put_file", slow)
    start = time.monotonic()
    with pytest.raises(InterruptedRunError, match=r"is saved; .*; step \d is not copied .* 0.2 s"):
        fit(tmp_path, sections=sections(copy_wait_seconds=0.2), hooks=[Signal()])
    assert time.monotonic() - start < 20
    assert copied_steps() == []


class FailsFrom:
    """The store fails from this step on; a signal comes at another one."""

    def __init__(self, patch, step, signal_at=None):
        self.patch, self.step, self.signal_at = patch, step, signal_at

    def on_step(self, run, step):
        if step.step == self.step:
            fail_writes(self.patch, after=0)
        if step.step == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def patient_store(monkeypatch):
    """Requests that fail are repeated for minutes; what is said after 5 s is said after one."""
    monkeypatch.setattr(copying, "PAUSES", (0.1,) * 3000)
    monkeypatch.setattr(copying, "SAY_AFTER_SECONDS", 1.0)
    monkeypatch.setattr(remote_folder, "SAY_AFTER_SECONDS", 1.0)


def test_a_store_that_fails_at_the_end_is_told_of_and_asked_for_one_time(
    tmp_path, patch, patient_store
):
    """Several copies are waiting by then."""
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"step 12 is not copied .*the store is out of order"):
        fit(
            tmp_path,
            sections=sections(on_error="warn", copy_wait_seconds=3.0),
            hooks=[FailsFrom(patch, 2)],
        )
    assert time.monotonic() - start < 30  # each by itself would take 5 minutes
    log = (tmp_path / "log.txt").read_text()
    line = [line for line in log.splitlines() if "it is asked again for" in line][-1]
    assert "warning: step 12 is not copied to memory://bucket/run: cannot write" in line
    assert "the store is out of order; it is asked again for " in line


def test_a_signal_names_the_newest_step_that_is_not_copied(tmp_path, patch, patient_store):
    told = r"step 10 is not copied to memory://bucket/run: .*the store is out of order"
    start = time.monotonic()
    with pytest.raises(InterruptedRunError, match=told):
        fit(
            tmp_path,
            sections=sections(16, on_error="warn", copy_wait_seconds=4.0),
            hooks=[FailsFrom(patch, 2, signal_at=10)],
        )
    assert time.monotonic() - start < 20


def test_a_copy_under_way_is_told_of_too(tmp_path, monkeypatch, patient_store):
    put = MemoryFileSystem.put_file

    def slow(self, *arguments, **options):
        time.sleep(0.5)
        return put(self, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", slow)
    fit(tmp_path, sections=sections(2, copy_wait_seconds=0.1))  # it does not fail: not limited
    log = (tmp_path / "log.txt").read_text()
    assert "step 2 is not copied to memory://bucket/run yet, and it is waited for" in log
    assert copied_steps() == [2]


def test_a_step_saved_again_while_it_is_copied_is_no_damage(tmp_path, monkeypatch):
    """Its folder is replaced after its first file was sent."""
    run, _ = fit(tmp_path, sections={**sections(4), "checkpoint": {}})
    own = run.folder.store  # whose run has ended: another one may hold the lock by now
    store = CheckpointStore(own.folder, run_id=own.run_id, config_hash=own.config_hash)
    before = store.latest()
    remote = copying.RemoteCopies(remote_folder.RemoteFolder(URL), [])
    copies = copying.CheckpointCopies(config(**sections()).checkpoint, run.folder, remote)
    put, is_replaced = MemoryFileSystem.put_file, []

    def replacing(self, *arguments, **options):
        put(self, *arguments, **options)
        if not is_replaced:
            is_replaced.append(True)
            groups = {name: dict(before.tensors(name)) for name in before.manifest.groups}
            groups["model"] = {name: tensor[...] + 1 for name, tensor in groups["model"].items()}
            store.save(
                Contents(4, groups, before.state, {"config.toml": before.read("config.toml")})
            )

    monkeypatch.setattr(MemoryFileSystem, "put_file", replacing)
    copies.request(4, ())
    assert copies.finish(run.world, lambda: False, print) is None
    assert [each.error for each in copies.take_done()] == [None]
    (made,) = remote.copies.values()
    now = (tmp_path / "checkpoints" / "step-00000004" / MANIFEST_NAME).read_bytes()
    assert MemoryFileSystem.store[f"/bucket/run/{made.prefix}/{MANIFEST_NAME}"].getvalue() == now
    prefixes = {key.split("/")[4] for key in MemoryFileSystem.store if key.count("/") > 4}
    assert prefixes == {made.folder}  # what was sent first is taken back


def test_a_resumed_run_keeps_its_events_of_copies(tmp_path):
    with pytest.raises(RuntimeError, match="the machine is gone"):
        fit(tmp_path, sections=sections(), hooks=[DiesAt(10)])
    before = events(tmp_path, "copy")
    assert [e["step"] for e in before] == [4, 8]
    fit(tmp_path, sections=sections())
    assert events(tmp_path, "copy")[:2] == before
    assert [e["step"] for e in events(tmp_path, "copy")] == [4, 8, 12]


def test_runs_that_are_not_to_be_mixed(tmp_path):
    fit(tmp_path / "a", sections=sections())
    fit(tmp_path / "b", sections={**sections(), "checkpoint": {}})
    with pytest.raises(ConfigError, match=r"holds checkpoints of run .* and memory://bucket/run"):
        fit(tmp_path / "b", sections=sections())
    with pytest.raises(ConfigError, match="--resume never: memory://bucket/run already holds"):
        fit(tmp_path / "c", sections=sections(), resume="never")
    given = tmp_path / "a" / "checkpoints" / "step-00000008"
    with pytest.raises(ConfigError, match="begins a new run, and memory://bucket/run holds"):
        fit(tmp_path / "c", sections=sections(), resume=str(given))
    other = {**sections(), "optimizer": {"learning_rate": 1e-3}}
    with pytest.raises(ConfigError, match=r"learning_rate: [^$]*, with another checkpoint.copy_to"):
        fit(tmp_path / "c", sections=other)
    assert copied_steps() == [8, 12]


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///tmp/run", "memory://run"])
def test_a_run_folder_is_on_a_disk(url):
    for given in (url, Path(url)):
        with pytest.raises(ConfigError, match=r"run_dir=\w+:/.* is a URL.*checkpoint.copy_to"):
            Trainer(config(), run_dir=given)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("/mnt/disk", "is no URL; write s3://bucket/folder, or file:///folder"),
        ("s3://me:secret@host/run", "s3://host/run is given with a user or password"),
        ("s3://host/run?token=secret", r"s3://host/run is given with token=…"),
    ],
)
def test_a_url_with_a_secret_is_refused(url, told):
    with pytest.raises(ValidationError, match=told) as caught:
        config(checkpoint={"copy_to": url})
    assert "secret@" not in caught.value.errors()[0]["msg"]
    assert "=secret" not in caught.value.errors()[0]["msg"]
