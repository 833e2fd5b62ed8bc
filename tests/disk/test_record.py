"""A small record is read whole or not at all, whatever is in its file."""

import json
import os
from dataclasses import asdict, dataclass

import pytest

from pentameter.disk import atomic
from pentameter.disk.record import MOST_BYTES, read_record, record_of, write_record
from pentameter.errors import StorageError


@dataclass(frozen=True)
class Seen:
    name: str
    members: tuple[str, ...] = ()


def test_what_was_written_is_read_with_lists_as_tuples(tmp_path):
    path = tmp_path / "room" / "seen.json"
    for seen in (Seen("a", ("b", "c")), Seen("ä")):
        write_record(path, seen)
        assert read_record(path, Seen) == seen
        assert read_record(path, dict) == asdict(seen)
    assert [each.name for each in path.parent.iterdir()] == ["seen.json"]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"7", b"null", b"\xff", b'{"members": []}', b'{"name": 1, "other": 1}'),
        *(b"[" * 100_000, b'{"name": "' + b"a" * MOST_BYTES + b'"}'),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_anything_else_is_none(tmp_path, content):
    path = tmp_path / "seen.json"
    path.write_bytes(content)
    assert read_record(path, Seen) is None


def test_what_is_no_file_of_ours_is_none(tmp_path):
    (tmp_path / "target").write_text(json.dumps({"name": "a"}))
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder", "absent"):
        assert read_record(tmp_path / name, Seen) is None
    assert read_record(tmp_path / "target", Seen) == record_of('{"name": "a"}', Seen) == Seen("a")


def test_a_record_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "seen.json"
    write_record(path, {"name": "a"})

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "write", refuse)
    with pytest.raises(StorageError, match=r"seen\.json: No space left"):
        write_record(path, Seen("b"))
    assert read_record(path, Seen) == Seen("a")
    with pytest.raises(StorageError, match="cannot write"):
        write_record(tmp_path / "gone" / "run" / "seen.json", Seen("b"))


def test_nobody_waits_for_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "sync_descriptor", lambda fd: pytest.fail("synced"))
    write_record(tmp_path / "seen.json", Seen("a"))
    with pytest.raises(pytest.fail.Exception):
        atomic.write_atomic(tmp_path / "durable", b"")


def test_a_file_has_its_mode_from_the_moment_it_is_there(tmp_path):
    path = tmp_path / "program"
    atomic.write_atomic(path, b"#!/bin/sh", mode=0o755)
    assert os.access(path, os.X_OK)
