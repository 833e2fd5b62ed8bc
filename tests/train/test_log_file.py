"""Logs on a disk that refuses them: whole lines, in order, and the training goes on."""

import errno
import os
import shutil
import subprocess
from contextlib import suppress

import pytest
from tiny_runs import events, fit

from pentameter.errors import StorageError
from pentameter.record.log_files import LogFile

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Disk:
    """The disk of files of one name, which takes `room` more bytes and then is full."""

    def __init__(self, monkeypatch, name):
        self.name, self.room, self.cuts = name, None, True
        self._write, self._truncate = os.write, os.ftruncate
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "ftruncate", self.truncate)

    def is_ours(self, fd):
        return self.room is not None and self.name in os.readlink(f"/proc/self/fd/{fd}")

    def write(self, fd, data):
        if not self.is_ours(fd):
            return self._write(fd, data)
        if self.room == 0:
            raise FULL
        n_written = self._write(fd, bytes(data)[: self.room])
        self.room -= n_written
        return n_written

    def truncate(self, fd, n_bytes):
        if self.is_ours(fd) and not self.cuts:
            raise FULL
        self._truncate(fd, n_bytes)


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def log(tmp_path, warnings):
    log = LogFile(tmp_path / "log.jsonl", warnings.append)
    yield log
    log.close()


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("room", [0, 3, 9])
def test_lines_wait_for_space_and_none_is_torn(monkeypatch, log, warnings, room, cuts):
    disk = Disk(monkeypatch, "log.jsonl")
    log.append("line 1")
    disk.room, disk.cuts = room, cuts
    log.append("line 2")
    log.append("line 3")
    whole = b"line 1\n" if room < 7 else b"line 1\nline 2\n"
    assert log.sync() == len(whole)
    assert [line[:-1] for line in log.unwritten] == [b"line 2", b"line 3"][room >= 7 :]
    if cuts:
        assert log.path.read_bytes() == whole
    disk.room = None
    log.append("line 4")
    assert log.path.read_text().splitlines() == [f"line {n}" for n in (1, 2, 3, 4)]
    assert log.sync() == log.path.stat().st_size == 28
    assert len(warnings) == 1
    assert "log.jsonl: No space left on device; free some space" in warnings[0]


def test_a_removed_file_is_put_back(log, warnings):
    log.append("line 1")
    log.path.unlink()
    log.append("line 2")
    log.path.rename(log.path.with_name("moved"))
    assert log.sync() == 14
    assert log.path.read_text() == "line 1\nline 2\n"
    log.path.write_text("another file\n")
    log.append("line 3")
    assert log.path.read_text() == "another file\nline 3\n"
    assert warnings == []


def test_the_name_of_a_new_file_is_synced_too(monkeypatch, log):
    """Else a power loss may leave a checkpoint, and no file with the events that led to it."""
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))
    )
    file, folder = str(log.path), str(log.path.parent)
    log.append("line 1")
    log.sync()
    assert synced == [file, folder]
    log.append("line 2")
    log.sync()
    assert synced == [file, folder, file]  # once is enough
    log.path.unlink()
    log.append("line 3")
    log.sync()
    assert synced[-2:] == [file, folder]


def test_a_folder_that_is_gone_and_comes_back(tmp_path, warnings):
    log = LogFile(tmp_path / "run" / "log.jsonl", warnings.append)
    log.append("line 1")  # not there yet
    log.path.parent.mkdir()
    log.append("line 2")
    shutil.rmtree(log.path.parent)
    log.append("line 3")
    assert log.sync() == 14
    log.path.parent.mkdir()
    log.append("line 4")
    log.close()
    assert log.path.read_text() == "line 1\nline 2\nline 3\nline 4\n"
    assert len(warnings) == 1


def test_what_cannot_be_written_at_all_ends_nothing(tmp_path, warnings):
    log = LogFile(tmp_path, warnings.append)  # a folder
    for number in range(10_020):
        log.append(str(number))
    assert len(log.unwritten) == 10_000
    log.sync()
    log.close()
    assert len(warnings) == 1


def test_a_resumed_run_has_each_line_that_waited_for_the_disk_once(tmp_path, monkeypatch):
    """Also where they waited while the checkpoint was saved from which it goes on."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    disk = Disk(monkeypatch, "metrics.jsonl")

    class Fill:
        def __init__(self, free_at, end_at):
            self.free_at, self.end_at = free_at, end_at

        def on_step(self, trainer, metrics):
            if metrics.step == 3:
                disk.room = 10
            if metrics.step == self.free_at:
                disk.room = None
            if metrics.step == self.end_at:
                raise RuntimeError("killed")

    fit(whole)
    for free_at in (6, 99):
        folder = run.with_name(f"run-{free_at}")
        with pytest.raises(RuntimeError, match="killed"):
            fit(folder, hooks=[Fill(free_at, 7)])
        disk.room = None
        fit(folder)
        for kind in ("train", "eval", "checkpoint"):
            assert [e["step"] for e in events(folder, kind)] == [
                e["step"] for e in events(whole, kind)
            ]
        assert "metrics.jsonl: No space left" in (folder / "log.txt").read_text()


def test_logs_and_samples_that_are_removed_or_refused_end_no_run(tmp_path, monkeypatch):
    run = tmp_path / "run"
    sections = {"train": {"sample_interval": 2, "sample_tokens": 4}}
    refuses = []
    real = os.open

    def refuse(path, *arguments, **options):
        if refuses and "/samples/" in str(path):
            raise FULL
        return real(path, *arguments, **options)

    class Remove:
        def on_step(self, trainer, metrics):
            if metrics.step == 3:
                shutil.rmtree(run / "samples")
                (run / "metrics.jsonl").unlink()
                (run / "log.txt").unlink()
            if metrics.step == 5:
                refuses.append(True)
            if metrics.step == 9:
                refuses.clear()

    monkeypatch.setattr(os, "open", refuse)
    _, end = fit(run, sections=sections, hooks=[Remove()])
    assert end.reason == "completed"
    assert sorted(path.name[5:13] for path in (run / "samples").iterdir()) == [
        f"{step:08d}" for step in (4, 10, 12)
    ]
    assert [e["step"] for e in events(run, "train")] == list(range(1, 13))
    log = (run / "log.txt").read_text()
    assert log.count("warning: cannot write") == 1
    assert "step  1/12" in log


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, check=False, capture_output=True).returncode
    ):
        pytest.skip("no permission to mount a disk")
    yield folder
    if folder.is_mount():
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_and_is_freed(small_disk, tmp_path):
    run, whole = small_disk / "run", tmp_path / "whole"
    filler = small_disk / "filler"

    class Fill:
        def on_step(self, trainer, metrics):
            if metrics.step == 2:
                with filler.open("wb", buffering=0) as file, suppress(OSError):
                    while True:
                        file.write(bytes(4096))
            if metrics.step == 37:  # the lines since have outgrown any block that was begun
                filler.unlink()

    sections = {"checkpoint": {"on_error": "warn"}, "train": {"steps": 40, "eval_interval": 8}}
    for folder, hooks in ((run, [Fill()]), (whole, [])):
        _, end = fit(folder, sections=sections, hooks=hooks)
        assert end.reason == "completed"
    assert [e["loss"] for e in events(run, "train")] == [e["loss"] for e in events(whole, "train")]
    assert [e["step"] for e in events(run, "checkpoint")] == [40]
    assert (run / "log.txt").read_text().count("warning: cannot write") >= 2


@pytest.mark.parametrize("name", [".", "run"])
def test_a_disk_that_is_unmounted_ends_the_run(small_disk, name):
    """The run folder is the mount point, or lies below it: the bare mount point gets nothing."""

    class Unmount:
        def on_step(self, trainer, metrics):
            if metrics.step == 6:
                subprocess.run(["umount", "-l", str(small_disk)], check=True)

    sections = {"train": {"sample_interval": 7, "sample_tokens": 4}}
    with pytest.raises(StorageError, match=r"cannot write to .*was its disk unmounted"):
        fit(small_disk / name, sections=sections, hooks=[Unmount()])
    assert list(small_disk.iterdir()) == []


def test_a_run_folder_that_is_removed_ends_the_run(tmp_path):
    class Remove:
        def on_step(self, trainer, metrics):
            if metrics.step == 6:
                shutil.rmtree(tmp_path / "run")

    with pytest.raises(StorageError, match="the folder that this run has opened, which is not"):
        fit(tmp_path / "run", hooks=[Remove()])
    assert not (tmp_path / "run").exists()
