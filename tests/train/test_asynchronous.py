"""Checkpoints that are written beside training."""

import errno
import hashlib
import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch
from tiny_runs import config, events, fit

from pentameter.checkpoint.format import save_phases
from pentameter.errors import InterruptedRunError, StorageError, TrainingFailedError
from pentameter.estimating.bytes.plan_estimates import plan_memory, plan_record, plan_state_bytes
from pentameter.planning.plan import make_plan
from pentameter.train.keep.saving import _PendingSave, host_bytes_while_saving
from pentameter.train.loop import Trainer

EACH_FOUR = {"train": {"eval_interval": None}, "checkpoint": {"interval": 4}}


def sections(*, asynchronous=True, **checkpoint):
    settings = {"interval": 4, "keep_last": 9, "asynchronous": asynchronous, **checkpoint}
    return {"train": {"eval_interval": None}, "checkpoint": settings}


def saved_steps(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-????????"))


def tensor_files(run, step):
    """Name → sha256 of the files that hold tensors, and of the tokenizer."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.suffix == ".safetensors" or path.name == "tokenizer.json"
    }


def losses(run):
    return [(e["step"], e["loss"], e["grad_norm"]) for e in events(run, "train")]


@pytest.fixture
def slow_disk(monkeypatch):
    """A gate before each write of a thread: closed until a test opens it."""
    gate = threading.Event()
    real = save_phases.write_verified

    def write(path, chunks):
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(30)
        return real(path, chunks)

    monkeypatch.setattr(save_phases, "write_verified", write)
    return gate


class Seen:
    """Notes what happened in order, and acts at a step."""

    def __init__(self, step=None, act=None):
        self.order, self.step, self.act = [], step, act

    def on_step(self, trainer, step):
        self.order.append(step.step)
        if step.step == self.step:
            self.act(trainer)

    def on_checkpoint(self, trainer, saved):
        self.order.append(f"saved {saved.step}")


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, slow_disk):
    seen = Seen(6, lambda trainer: slow_disk.set())
    run = tmp_path / "run"
    fit(run, sections=sections(), hooks=[seen])
    assert seen.order.index("saved 4") > seen.order.index(6)
    assert seen.order[-1] == "saved 12"
    assert saved_steps(run) == [4, 8, 12]
    assert [e["step"] for e in events(run, "checkpoint")] == [4, 8, 12]
    first, last = events(run, "checkpoint")[0], events(run, "checkpoint")[-1]
    assert 0 < first["stall_seconds"] < first["seconds"]
    assert last["stall_seconds"] >= last["seconds"] > 0  # nothing is beside the last one


def test_the_last_save_may_take_as_long_as_those_beside_training(tmp_path):
    """What a launcher takes for a hang while the run is stopping: copying is no measure of it."""
    done, seconds = [], []

    class Notes:
        def on_start(self, trainer):
            progress = trainer.world.activity
            real, took = progress.note, progress.took
            progress.note = lambda doing, *a, **k: (done.append(doing), real(doing, *a, **k))
            progress.took = lambda doing, s: (seconds.append((doing, s)), took(doing, s))

        def on_checkpoint(self, trainer, saved):
            if saved.step < 12:
                assert ("saving", saved.seconds) in seconds
                assert ("committing", saved.seconds) in seconds

    fit(tmp_path / "run", sections=sections(), hooks=[Notes()])
    assert [each for each in done if each not in ("training", "testing")] == [
        *["copying", "committing"] * 2,
        "saving",
    ]


def test_it_saves_what_a_save_that_is_waited_for_does(tmp_path, slow_disk):
    """The same bytes, although the weights had changed before they were written; and the run that
    goes on from such a checkpoint is the same run."""
    beside, waited = tmp_path / "beside", tmp_path / "waited"
    fit(beside, sections=sections(), hooks=[Seen(6, lambda trainer: slow_disk.set())])
    fit(waited, sections=sections(asynchronous=False))
    for step in (4, 8, 12):
        assert tensor_files(beside, step) == tensor_files(waited, step)
    assert losses(beside) == losses(waited)
    again = tmp_path / "again"
    fit(again, sections=sections(), hooks=[Seen(5, lambda trainer: trainer.stop("for a while"))])
    os.rename(again / "checkpoints" / "step-00000005", tmp_path / "step-00000005")
    fit(again, sections=sections())  # from step 4, which was written beside step 5
    assert losses(again) == losses(waited)
    assert tensor_files(again, 12) == tensor_files(waited, 12)


def test_a_save_that_falls_due_waits_for_the_one_under_way(tmp_path, slow_disk):
    run = tmp_path / "run"

    class Opens:
        def on_step(self, trainer, step):
            if step.step == 2:
                threading.Timer(0.2, slow_disk.set).start()

    seen = Seen()
    fit(run, sections=sections(interval=1, keep_last=12), hooks=[seen, Opens()])
    assert seen.order[:4] == [1, 2, "saved 1", 3]
    assert events(run, "checkpoint")[0]["stall_seconds"] > 0.1
    assert saved_steps(run) == list(range(1, 13))


def test_nothing_is_left_of_a_save_during_which_the_disk_was_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(_PendingSave, "all_have_written", lambda self: True)  # commit at once
    run, away = tmp_path / "run", tmp_path / "away"
    gone = Seen(5, lambda trainer: os.rename(run, away))
    back = Seen(7, lambda trainer: os.rename(away, run))
    fit(run, sections=sections(on_error="warn"), hooks=[gone, back])
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-00000008",
        "step-00000012",
    ]


@pytest.fixture
def failing_disk(monkeypatch):
    """Steps whose checkpoint cannot be written."""
    steps = set()
    real = save_phases.write_verified

    def write(path, chunks):
        if any(f"step-{step:08d}" in str(path) for step in steps):
            raise StorageError(f"cannot write {path}: No space left on device; free some space")
        return real(path, chunks)

    monkeypatch.setattr(save_phases, "write_verified", write)
    return steps


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_write_that_fails_ends_the_run_and_loses_nothing(tmp_path, failing_disk, asynchronous):
    run, whole = tmp_path / "run", tmp_path / "whole"
    chosen = sections(asynchronous=asynchronous)
    chosen["train"]["steps"] = 16  # so that a save falls due after the one that fails, not the last
    failing_disk.add(8)
    with pytest.raises(
        StorageError,
        match=r"step 8 is not saved: cannot write .*free some space; "
        "the last checkpoint is step 4, where the same command goes on",
    ) as got:
        fit(run, sections=chosen)
    assert got.value.exit_code == 74
    assert os.listdir(run / "checkpoints") == ["step-00000004"]
    assert "cannot write" in events(run, "end")[-1]["reason"]
    failing_disk.clear()
    for folder in (run, whole):
        fit(folder, sections=chosen)
    assert losses(run) == losses(whole)
    assert tensor_files(run, 16) == tensor_files(whole, 16)


def test_a_write_that_fails_is_a_warning_where_that_is_asked_for(tmp_path, failing_disk):
    run = tmp_path / "run"
    failing_disk.add(8)
    fit(run, sections=sections(on_error="warn"))
    assert saved_steps(run) == [4, 12]
    assert "warning: step 8 is not saved: cannot write" in (run / "log.txt").read_text()


def test_the_last_save_is_made_although_the_one_before_it_failed(tmp_path, failing_disk, slow_disk):
    run = tmp_path / "run"
    failing_disk.add(8)
    end = [Seen(9, lambda trainer: trainer.stop("enough")), Seen(9, lambda _: slow_disk.set())]
    fit(run, sections=sections(interval=8), hooks=end)
    assert saved_steps(run) == [9]
    assert "warning: step 8 is not saved" in (run / "log.txt").read_text()


def test_a_signal_during_a_write_saves_both(tmp_path, slow_disk):
    run, whole = tmp_path / "run", tmp_path / "whole"

    def stop(trainer):
        signal.raise_signal(signal.SIGTERM)
        threading.Timer(0.2, slow_disk.set).start()

    with pytest.raises(InterruptedRunError, match="after step 6, which is saved"):
        fit(run, sections=sections(), hooks=[Seen(6, stop)])
    assert saved_steps(run) == [4, 6]
    assert [e["step"] for e in events(run, "checkpoint")] == [4, 6]
    for folder in (run, whole):
        fit(folder, sections=sections())
    assert losses(run) == losses(whole)


def test_an_error_during_a_write_leaves_that_checkpoint(tmp_path, slow_disk):
    run = tmp_path / "run"

    def fail(trainer):
        slow_disk.set()
        raise RuntimeError("a hook")

    with pytest.raises(RuntimeError, match="a hook"):
        fit(run, sections=sections(), hooks=[Seen(6, fail)])
    assert saved_steps(run) == [4]
    assert [e["step"] for e in events(run, "checkpoint")] == [4]
    assert not any(thread.name.startswith("save of") for thread in threading.enumerate())


def test_giving_up_during_a_write_keeps_what_is_good(tmp_path, slow_disk):
    """The checkpoint under way is as good as the steps after it."""
    run = tmp_path / "run"

    def spoil(trainer):
        threading.Timer(0.2, slow_disk.set).start()
        with torch.no_grad():
            next(iter(trainer.engine.parameters())).fill_(float("nan"))

    with pytest.raises(TrainingFailedError, match="the last checkpoint is step 4"):
        fit(run, sections=sections(interval=4), hooks=[Seen(5, spoil)])
    assert saved_steps(run) == [4]


def test_without_memory_for_the_copy_the_remedy_is_named(tmp_path, monkeypatch):
    def mmap(*arguments, **options):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    run = tmp_path / "run"
    real = save_phases.HostBuffers.copy

    def copy(self, files):
        with monkeypatch.context() as patch:
            patch.setattr(save_phases.mmap, "mmap", mmap)
            return real(self, files)

    monkeypatch.setattr(save_phases.HostBuffers, "copy", copy)
    with pytest.raises(
        StorageError,
        match=r"cannot copy .*Cannot allocate memory.*set checkpoint.asynchronous=false",
    ):
        fit(run, sections=sections())
    assert os.listdir(run / "checkpoints") == []


def test_the_memory_of_a_snapshot_is_planned_and_kept(tmp_path, monkeypatch):
    sizes, places = [], []
    real = save_phases.HostBuffers.copy

    def copy(self, files):
        copied = real(self, files)
        sizes.append(sum(buffer.numel() for buffer in self._buffers.values()))
        places.append(sorted(buffer.data_ptr() for buffer in self._buffers.values()))
        return copied

    monkeypatch.setattr(save_phases.HostBuffers, "copy", copy)
    run, _ = fit(tmp_path / "run", sections=sections(interval=2))
    assert len(sizes) == 5  # the last of six is not beside anything
    assert all(place == places[0] for place in places)
    n_parameters = len(list(run.engine.parameters()))
    held = plan_state_bytes(run.plan)
    assert set(sizes) == {held.snapshot_bytes + 4 * n_parameters}  # AdamW counts steps
    assert plan_record(run.plan)["memory"]["snapshot_bytes"] == held.snapshot_bytes


@pytest.mark.parametrize(("n_bytes", "beside"), [(10**12, True), (0, False)])
def test_it_is_the_default_where_memory_allows(tmp_path, monkeypatch, n_bytes, beside):
    from pentameter.train.keep import saving

    monkeypatch.setattr(saving, "host_memory_bytes", lambda: n_bytes)
    copied = []
    real = save_phases.HostBuffers.copy
    monkeypatch.setattr(save_phases.HostBuffers, "copy", lambda *a: (copied.append(1), real(*a))[1])
    fit(tmp_path / "run", sections=EACH_FOUR)
    assert bool(copied) is beside


def test_what_a_process_takes_on_its_host_while_it_saves(tmp_path):
    trainer = Trainer(config(), run_dir=tmp_path / "run", quiet=True)
    trainer.fit()
    plan, compute = trainer.run.plan, trainer.run.compute
    needed = host_bytes_while_saving(plan, compute)
    held = plan_state_bytes(plan)
    assert needed == held.snapshot_bytes + plan_memory(plan, "fp32").total_bytes
    assert plan_state_bytes(make_plan(plan.config)).snapshot_bytes == 3 * held.weights_bytes


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no large pages here"
)
def test_a_snapshot_s_memory_may_have_large_pages():
    buffer = save_phases._host_buffer(2**23, pinned=False)
    address = buffer.data_ptr()
    entries = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    (entry,) = (
        each
        for each in entries
        if int(each.split("-")[0], 16) <= address < int(each.split("-")[1].split()[0], 16)
    )
    assert " rw-p " in entry.splitlines()[0]  # shared memory has a setting of its own
    assert " hg" in entry[entry.index("VmFlags") :]
