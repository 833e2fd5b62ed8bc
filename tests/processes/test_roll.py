"""The roll of nodes: who is there, and who answers whom."""

from __future__ import annotations

import os
import time

import pytest

from pentameter.errors import ConfigError, StorageError
from pentameter.processes import roll
from pentameter.processes.roll import Roll, own_address

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
    write = roll.replace_file
    failures = []

    def refuse(path, content):
        if len(failures) < 3:
            failures.append(path)
            raise StorageError("the other machine's disk is slow")
        write(path, content)

    monkeypatch.setattr(roll, "replace_file", refuse)
    second.update(state="lost")
    wait_until(lambda: first.present().get(second.me.name, first.me).state == "lost")
    assert failures
    for each in (first, second):
        each.close()


def test_a_launcher_that_is_killed_is_gone_at_once(tmp_path, monkeypatch):
    """Its file stays, and its machine refuses pings."""
    first, second = (Roll(tmp_path, LOOPBACK, 1) for _ in range(2))
    wait_until(lambda: first.me.reaches == (second.me.name,))
    second._closing.set()
    second._thread.join()
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


@pytest.mark.skipif(not os.path.exists("/proc/net/dev"), reason="asks Linux for interfaces")
def test_the_interface_that_gloo_is_told_is_the_address():
    assert own_address({"GLOO_SOCKET_IFNAME": "lo"}) == (LOOPBACK, "lo")
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME=none0 is no network interface"):
        own_address({"GLOO_SOCKET_IFNAME": "none0"})
