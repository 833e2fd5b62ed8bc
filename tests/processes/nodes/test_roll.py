"""The roll of nodes: who is there, and who answers whom."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from pentameter.disk import record
from pentameter.errors import CorruptError, StorageError
from pentameter.processes.nodes import roll
from pentameter.processes.nodes.roll import Roll

LOOPBACK = "127.0.0.1"


def wait_until(reached):
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nodes_see_and_reach_each_other_until_one_leaves(tmp_path):
    first, second = (Roll(tmp_path / "nodes", LOOPBACK, 2) for _ in range(2))
    try:
        both = {first.me.name, second.me.name}
        wait_until(lambda: first.present().keys() == second.present().keys() == both)
        wait_until(lambda: first.me.reaches == (second.me.name,))
        wait_until(lambda: first.present()[second.me.name].reaches == (first.me.name,))
        assert first.knows_all()
        second.update(state="lost", message="rank 1 was killed")
        wait_until(lambda: first.present()[second.me.name].message == "rank 1 was killed")
    finally:
        second.close()
    wait_until(lambda: first.present().keys() == {first.me.name})
    first.close()
    assert not list((tmp_path / "nodes").iterdir())


def test_a_file_that_cannot_be_written_now_is_written_later(tmp_path, monkeypatch):
    first, second = (Roll(tmp_path, LOOPBACK, 1) for _ in range(2))
    write = roll.write_record
    failures = []

    def refuse(path, content):
        if len(failures) < 3:
            failures.append(path)
            raise StorageError("the other machine's disk is slow")
        write(path, content)

    monkeypatch.setattr(roll, "write_record", refuse)
    second.update(state="lost")
    wait_until(lambda: first.present().get(second.me.name, first.me).state == "lost")
    assert failures
    for each in (first, second):
        each.close()


def test_a_launcher_that_is_killed_is_gone_at_once(tmp_path, monkeypatch):
    """Its file stays, and its machine refuses pings."""
    first, second = (Roll(tmp_path, LOOPBACK, 1) for _ in range(2))
    wait_until(lambda: first.me.reaches == (second.me.name,))
    second._beat.close()
    second._answering.close()
    begin = time.monotonic()
    wait_until(lambda: first.present().keys() == {first.me.name})
    assert time.monotonic() < begin + roll.GONE_SECONDS
    first.close()


def test_a_file_that_a_dead_launcher_left_is_no_node(tmp_path, monkeypatch):
    monkeypatch.setattr(roll, "GONE_SECONDS", 0.5)
    gone = Roll(tmp_path, LOOPBACK, 1)
    left = (tmp_path / f"{gone.me.name}.json").read_bytes()
    gone.close()
    (tmp_path / f"{gone.me.name}.json").write_bytes(left)
    (tmp_path / "damaged.json").write_text('{"name": 3}')
    newcomer = Roll(tmp_path, LOOPBACK, 1)
    assert not newcomer.knows_all()  # it may be alive
    wait_until(newcomer.knows_all)
    assert newcomer.present().keys() == {newcomer.me.name}
    newcomer.close()


@pytest.fixture
def two(tmp_path):
    """Two nodes that reach each other, and know that they live."""
    first, second = (Roll(tmp_path / "run" / "nodes", LOOPBACK, 1) for _ in range(2))
    wait_until(lambda: first.me.reaches == (second.me.name,))
    wait_until(lambda: len(first.present()) == len(second.present()) == 2)
    yield first, second
    for each in (first, second):
        each.close()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOENT])
def test_a_file_that_cannot_be_read_for_a_moment_is_a_living_nodes(two, monkeypatch, number):
    first, second = two
    read, until = record.read_regular, time.monotonic() + 1.5

    def fail(path, **options):
        if time.monotonic() < until:
            error = OSError(number, os.strerror(number))
            raise (CorruptError if number == errno.EIO else StorageError)("no answer") from error
        return read(path, **options)

    monkeypatch.setattr(record, "read_regular", fail)
    while time.monotonic() < until + 1.0:
        assert first.present().keys() == {first.me.name, second.me.name}
        assert second.me.name in first.me.reaches
        assert first._path(second.me.name).exists()
        time.sleep(0.01)


def test_a_node_whose_file_cannot_be_read_is_gone_after_a_while(two, monkeypatch):
    first, second = two
    monkeypatch.setattr(roll, "GONE_SECONDS", 1.0)

    def fail(path, **options):
        raise StorageError("no answer")

    monkeypatch.setattr(record, "read_regular", fail)
    wait_until(lambda: first.present().keys() == {first.me.name})
    assert first._path(second.me.name).exists()


def test_a_listing_that_fails_ends_no_beat(two, monkeypatch):
    first, second = two
    with monkeypatch.context() as patched:

        def fail(path, pattern):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patched.setattr(Path, "glob", fail)
        beat = first.me.beat
        wait_until(lambda: first.me.beat > beat + 2)
    assert first.present().keys() == {first.me.name, second.me.name}
    third = Roll(first._folder, LOOPBACK, 1)
    wait_until(lambda: third.me.name in first.present())
    third.close()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_run_folder_that_does_not_answer_for_a_moment_ends_no_beat(two, monkeypatch, number):
    first, second = two
    stat, folder = os.stat, first._folder.parent

    def fail(path, **options):
        if isinstance(path, Path) and path.is_relative_to(folder):
            raise OSError(number, os.strerror(number))
        return stat(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", fail)
        with pytest.raises(StorageError, match="not there any more"):
            first.check_folder()
        beat = first.me.beat
        wait_until(lambda: first.me.beat > beat + 1)
    beat = second.me.beat
    wait_until(lambda: first.me.beat > beat + 1)
    assert first.present().keys() == {first.me.name, second.me.name}


@pytest.mark.parametrize(
    "odd",
    [{"address": None, "ping_port": 1e9}, {"address": "a\0"}, {"name": "\ud800"}, {"name": 3}],
)
def test_a_file_without_an_address_ends_no_beat(two, odd):
    first, _ = two
    record = {**asdict(first.me), "name": "odd", **odd}
    for beat in range(3):
        first._path("odd").write_text(json.dumps({**record, "beat": beat}))
        before = first.me.beat
        wait_until(lambda before=before: first.me.beat > before + 1)


def test_who_stood_still_itself_takes_nobody_for_gone(two, monkeypatch):
    """A disk that hangs, here; a process that is frozen, likewise."""
    first, second = two
    read, hangs = record.read_regular, [True]

    def hang(path, **options):
        if hangs and path.stem == second.me.name:
            hangs.clear()
            time.sleep(roll.GONE_SECONDS + 2.0)
        return read(path, **options)

    monkeypatch.setattr(record, "read_regular", hang)
    until = time.monotonic() + roll.GONE_SECONDS + 4.0
    while time.monotonic() < until:
        assert first.present().keys() == {first.me.name, second.me.name}
        assert second.me.name in first.me.reaches
        time.sleep(0.01)


def test_the_stores_port_is_kept_for_it(two):
    first, _ = two
    for _ in range(2):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((LOOPBACK, first.me.store_port))
        store = TCPStore(LOOPBACK, first.me.store_port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        before = first.me.store_port
        first.renew_store_port()
        assert first.me.store_port != before
        del store


def test_a_folder_that_is_not_there_any_more_is_not_made_again(two, tmp_path):
    first, _ = two
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="was its disk unmounted"):
        first.check_folder()
    beat = first.me.beat
    wait_until(lambda: first.me.beat > beat + 1)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    wait_until(lambda: first.me.beat > beat + 3)
    assert not list((tmp_path / "run").iterdir())
    (tmp_path / "run").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    first.check_folder()
