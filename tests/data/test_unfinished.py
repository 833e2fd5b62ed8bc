"""A preparation that was killed leaves nothing that is taken for whole, and begins again cleanly;
one process at a time works for a target."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from preparing import corpus_at, prepare

from pentameter.data.prepare.splits import Splitting
from pentameter.data.shards.opening import open_shards
from pentameter.disk.lock import building
from pentameter.errors import ConfigError, StorageError

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "rests"]
SETTINGS = {"splitting": Splitting(0.2, 0.1, "document"), "shard_tokens": 150_000}

SCRIPT = """
import os, sys
from pathlib import Path
sys.path.append(sys.argv[5])
from preparing import corpus_at, prepare
from pentameter.data.prepare.splits import Splitting
at, tokenizer = int(sys.argv[3]), sys.argv[4]
calls = 0
def kill(stage, done, total):
    global calls
    calls += stage == "encoding"
    if calls == at:
        os.kill(os.getpid(), 9)
prepare(
    corpus_at(Path(sys.argv[1])), Path(sys.argv[2]), tokenizer=tokenizer, progress=kill,
    splitting=Splitting(0.2, 0.1, "document"), shard_tokens=150_000, n_processes=0,
)
"""


@pytest.fixture
def folder(tmp_path):
    """About 5 batches of text in 24 files."""
    rng = np.random.default_rng(0)
    (tmp_path / "text").mkdir()
    for number in range(24):
        words = rng.choice(WORDS, 20_000)
        (tmp_path / "text" / f"{number:02d}.txt").write_text(" ".join(words))
    return tmp_path / "text"


@pytest.fixture
def text(folder):
    return corpus_at(folder)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed(folder, out, at, tokenizer):
    arguments = [
        *(sys.executable, "-c", SCRIPT, str(folder), str(out), str(at), tokenizer),
        str(Path(__file__).parent),
    ]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr


@pytest.mark.parametrize("tokenizer", ["char", "word", "bpe:300"])
def test_a_killed_preparation_begins_again_and_gives_the_same_bytes(folder, tmp_path, tokenizer):
    whole = tmp_path / "whole"
    prepare(corpus_at(folder), whole, tokenizer=tokenizer, n_processes=0, **SETTINGS)
    out = tmp_path / "out"
    for at in (3, 1):  # twice
        killed(folder, out, at, tokenizer)
        assert not out.exists()
        assert [path.name for path in tmp_path.glob(".out.p*")] == [".out.part"]
    prepare(corpus_at(folder), out, tokenizer=tokenizer, n_processes=0, **SETTINGS)
    assert files(out) == files(whole)
    assert not list(tmp_path.glob(".*"))


def test_after_a_kill_other_text_or_settings_get_nothing_of_the_first(folder, tmp_path):
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    killed(folder, out, 5, "char")
    (folder / "00.txt").write_text("changed")
    for target in (out, fresh):
        prepare(corpus_at(folder), target, splitting=Splitting(0.0))
    assert files(out) == files(fresh)
    assert open_shards(out / "text.json").split("val").n_tokens == 0
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_leaves_nothing_half_made(text, tmp_path):
    def full(stage, done, total):
        if stage == "encoding" and done > 1_000_000:
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        prepare(text, tmp_path / "out", progress=full, **SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_processes_give_what_one_gives(text, tmp_path):
    for n_processes in (0, 2):
        out = tmp_path / str(n_processes)
        prepare(text, out, tokenizer="bpe:300", n_processes=n_processes, **SETTINGS)
    assert files(tmp_path / "0") == files(tmp_path / "2")


def no_lock(descriptor, operation):
    raise OSError(errno.EBADF, "Bad file descriptor")


def prepared_by_two(text, tmp_path):
    """A preparation that stands still while another of the same begins; what became of both."""
    out = tmp_path / "out"
    told, errors, second = [], [], None

    def other():
        try:
            prepare(
                text, out, keep_existing=True,
                progress=lambda stage, done, total: told.append(stage),
            )  # fmt: skip
        except Exception as error:
            errors.append(error)

    def begin_another(stage, done, total):
        nonlocal second
        if stage == "encoding" and done > 300_000 and second is None:
            second = threading.Thread(target=other)
            second.start()
            # It either waits for this one, which it tells, or is done without this one.
            for _ in range(12_000):
                second.join(0.01)
                if not second.is_alive() or "awaiting" in told:
                    break

    prepare(text, out, keep_existing=True, progress=begin_another)
    second.join()
    open_shards(out / "text.json")
    assert not errors
    return told


def test_one_process_at_a_time_prepares_and_others_say_they_wait(text, tmp_path):
    told = prepared_by_two(text, tmp_path)
    assert "awaiting" in told
    assert "encoding" not in told
    assert not list(tmp_path.glob(".*"))


def test_without_locks_each_has_a_folder_of_its_own(text, tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", no_lock)
    told = prepared_by_two(text, tmp_path)
    assert "awaiting" not in told
    assert "encoding" in told
    assert [path.name for path in tmp_path.glob(".*")] == [".out.lock"]


def test_the_lock_is_of_a_file_that_is_open_for_writing(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if mode != os.O_RDWR:  # as NFS has it
            raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", flock)
    with building(tmp_path / "out") as folder:
        assert folder.name == ".out.part"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_who_waited_finds_the_target(tmp_path):
    target, waits, found = tmp_path / "out", threading.Event(), []

    def other():
        try:
            with building(target, waits.set):
                found.append("a folder")
        except ConfigError as error:
            found.append(str(error))

    thread = threading.Thread(target=other)
    with building(target) as folder:
        (folder / "content").touch()
        thread.start()
        assert waits.wait(120)
    thread.join()
    assert "exists and is not an empty folder" in found.pop()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class StoppedError(Exception):
    pass


def test_an_error_leaves_nothing(tmp_path):
    with suppress(StoppedError), building(tmp_path / "out") as folder:
        (folder / "content").touch()
        raise StoppedError
    assert not list(tmp_path.iterdir())


def test_only_the_targets_own_leftovers_are_removed(tmp_path):
    for name in ("out1", "out[1]"):
        (tmp_path / f".{name}.part").mkdir()
        (tmp_path / f".{name}.part" / "content").touch()
    with building(tmp_path / "out[1]") as folder:
        assert not list(folder.iterdir())
    assert (tmp_path / ".out1.part" / "content").exists()
    assert not list((tmp_path / "out[1]").iterdir())
