"""Unfinished folders: one process at a time works for a target, and damage begins anew."""

import errno
import fcntl
import json
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from pentameter.data.batches.dataset import Dataset
from pentameter.data.corpora.text import text_from_paths
from pentameter.data.prepare.prepare import prepare
from pentameter.data.shards import writer as shard_writer
from pentameter.data.shards.shards import open_shards
from pentameter.data.tokenizers.bpe import END_OF_TEXT
from pentameter.disk.storage import continuing
from pentameter.errors import ConfigError

TEXT = "the quick brown fox jumps over the lazy dog. " * 20_000


class StoppedError(Exception):
    pass


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return text_from_paths([tmp_path / "text.txt"])


def stop(stage, done, total):
    if stage == "encoding" and done > 600_000:
        raise StoppedError


def stopped(text, out, tokenizer="char"):
    """The unfinished folder of a preparation that stopped half way."""
    with pytest.raises(StoppedError):
        prepare(
            text, out, tokenizer=tokenizer, note_seconds=0, shard_tokens=300_000, progress=stop,
            n_processes=0,
        )  # fmt: skip
    (folder,) = out.parent.glob(".out.part-*")
    return folder


def resumed(text, out, tokenizer="char"):
    """Whether the preparation went on where it stopped; it must have given what it should."""
    stages = set()
    prepare(
        text, out, tokenizer=tokenizer, shard_tokens=300_000, n_processes=0,
        progress=lambda stage, done, total: stages.add(stage),
    )  # fmt: skip
    dataset = Dataset(open_shards(out / "text.json"))
    tokens = [dataset.split(split).tokens[:] for split in ("train", "val")]
    decoded = "".join(map(dataset.tokenizer.decode, tokens))
    assert decoded.removesuffix(END_OF_TEXT) == TEXT
    assert not list(out.parent.glob(".*"))
    return "resuming" in stages


def no_lock(descriptor, operation):
    raise OSError(errno.EBADF, "Bad file descriptor")


def edited(**changes):
    def edit(folder):
        journal = folder / "journal.json"
        journal.write_text(json.dumps({**json.loads(journal.read_text()), **changes}))

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "journal.json").write_text("{"),
        lambda folder: (folder / "journal.json").write_bytes(b"\xff"),
        lambda folder: (folder / "journal.json").write_text("[]"),
        edited(splits={}),
        edited(noted=None),
        edited(tokenizer="another"),
        lambda folder: (folder / "train-00000.tokens").unlink(),
        lambda folder: (folder / "train-00001.tokens").unlink(),
        lambda folder: os.truncate(folder / "train-00000.tokens", 8),
        lambda folder: os.truncate(folder / "train-00001.tokens", 8),
        lambda folder: (folder / "train.documents").unlink(),
    ],
)
def test_a_damaged_unfinished_folder_is_begun_anew(text, tmp_path, damage):
    folder = stopped(text, tmp_path / "out")
    assert (folder / "train-00001.tokens").exists()
    damage(folder)
    assert not resumed(text, tmp_path / "out")


def test_a_damaged_tokenizer_is_made_again(text, tmp_path):
    folder = stopped(text, tmp_path / "out", "bpe:260")
    (folder / "tokenizer.json").write_text("{")
    assert resumed(text, tmp_path / "out", "bpe:260")


def test_what_is_noted_reaches_the_disk_with_its_name(text, tmp_path, monkeypatch):
    synced = []
    real = shard_writer.sync

    def sync(path):
        synced.append((path, (path / "journal.json").exists()))
        real(path)

    monkeypatch.setattr(shard_writer, "sync", sync)
    folder = stopped(text, tmp_path / "out")
    assert (folder, True) in synced


def prepared_by_two(text, tmp_path):
    """A preparation that stands still while another of the same begins; what became of both."""
    out = tmp_path / "out"
    told, errors, second = [], [], None

    def other():
        try:
            prepare(
                text, out, keep_existing=True, note_seconds=0,
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

    prepare(text, out, keep_existing=True, note_seconds=0, progress=begin_another)
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
    with continuing(tmp_path / "out", "key", "noted") as folder:
        assert folder.name == ".out.part-key"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_who_waited_finds_the_target(tmp_path):
    target, waits, found = tmp_path / "out", threading.Event(), []

    def other(keep_existing):
        try:
            with continuing(
                target, "other", "noted", keep_existing=keep_existing, waiting=waits.set
            ) as folder:
                found.append(folder)
        except ConfigError as error:
            found.append(str(error))

    for keep_existing, expected in ((True, "None"), (False, "exists and is not an empty folder")):
        waits.clear()
        thread = threading.Thread(target=other, args=(keep_existing,))
        with continuing(target, "one", "noted") as folder:
            (folder / "content").touch()
            thread.start()
            assert waits.wait(120)
        thread.join()
        assert expected in str(found.pop())
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        (target / "content").unlink()
        target.rmdir()


def unfinished(target, key):
    with suppress(StoppedError), continuing(target, key, "noted") as folder:
        (folder / "noted").touch()
        raise StoppedError
    return folder


def test_only_the_targets_own_unfinished_folders_are_removed(tmp_path):
    other = unfinished(tmp_path / "out1", "key")
    earlier = unfinished(tmp_path / "out[1]", "key")
    with continuing(tmp_path / "out[1]", "changed", "noted"):
        assert other.exists()
        assert not earlier.exists()


def test_an_unfinished_folder_that_vanishes_is_no_error(tmp_path, monkeypatch):
    glob = Path.glob

    def stale(self, pattern):
        return [*glob(self, pattern), tmp_path / ".out.part-gone"]

    monkeypatch.setattr(Path, "glob", stale)
    with continuing(tmp_path / "out", "key", "noted"):
        pass
    assert (tmp_path / "out").is_dir()
