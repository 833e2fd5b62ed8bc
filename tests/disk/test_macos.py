"""What a Mac says of itself and its processes, by commands that stand for its own."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from pentameter.disk import atomic, macos, owner
from pentameter.disk.atomic import sync_descriptor, write_atomic
from pentameter.disk.lock import RunLock, is_held
from pentameter.disk.owner import current_owner, is_dead, is_same_machine
from pentameter.errors import RunFolderInUseError
from pentameter.machine import cores_and_memory as cores
from pentameter.machine.capabilities import machine_capabilities

SAYS = """#!/bin/sh
case "$2" in
  kern.bootsessionuuid) echo 7D1A-BOOT ;;
  machdep.cpu.brand_string) echo Apple M3 Pro ;;
  hw.perflevel0.logicalcpu) echo 6 ;;
  *) echo "unknown oid $2" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def mac(monkeypatch, tmp_path):
    """A Mac's `sysctl` on the PATH, `ps` being the same, and no /proc to look at."""
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "sysctl").write_text(SAYS)
    (commands / "sysctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(owner, "_read_text", lambda path: "")
    macos.sysctl.cache_clear()
    owner._own_start.cache_clear()
    yield
    macos.sysctl.cache_clear()
    owner._own_start.cache_clear()


def test_a_mac_names_itself_its_chip_and_its_fast_cores(mac, monkeypatch):
    me = current_owner()
    assert me.boot == "7D1A-BOOT"
    assert me.process_start > 1e9  # seconds since 1970
    assert machine_capabilities().cpu.name == "Apple M3 Pro"
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores.usable_cores() == frozenset(range(6))


def missing(command, **options):
    raise FileNotFoundError(command[0])


def test_a_mac_that_says_nothing_is_asked_in_vain(mac, monkeypatch):
    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert macos.sysctl("hw.perflevel0.logicalcpu") == ""
    assert cores.usable_cores() == frozenset(range(os.cpu_count()))
    assert macos.process_start(os.getpid()) is None
    assert current_owner().process_start == 0


def test_a_process_that_took_a_dead_ones_number_holds_no_lock(mac, tmp_path):
    """Or `watch` would show a run that has crashed as one that trains."""
    other = subprocess.Popen(["sleep", "60"])
    try:
        me = current_owner()
        started = macos.process_start(other.pid)
        assert abs(started - me.process_start) < 3600
        alive = replace(me, pid=other.pid, process_start=started)
        assert not is_dead(alive, me)
        assert is_dead(replace(alive, process_start=started - 5), me)
        other.kill()  # a zombie until it is waited for
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert macos.process_start(other.pid) == -1
        assert is_dead(alive, me)
    finally:
        other.kill()
        other.wait()
    assert macos.process_start(other.pid) is None


def test_another_network_gives_a_mac_another_name_and_no_other_machine(mac):
    me = current_owner()
    assert is_same_machine(replace(me, host="mac.wifi.example"), me)
    assert not is_same_machine(replace(me, boot="another"), me)
    nameless = replace(me, boot="")
    assert not is_same_machine(replace(nameless, host="elsewhere"), nameless)


def test_elsewhere_the_name_tells_machines_apart():
    me = current_owner()
    assert not is_same_machine(replace(me, host="elsewhere"), me)


def test_a_crashed_run_in_another_network_goes_on_at_once(mac, tmp_path, monkeypatch):
    with RunLock(tmp_path / "run.lock") as lock:
        record = (tmp_path / "run.lock").read_bytes()
        with pytest.raises(RunFolderInUseError), RunLock(tmp_path / "run.lock"):
            pass
        assert is_held(lock.path)
    (tmp_path / "run.lock").write_bytes(record)
    monkeypatch.setattr("socket.gethostname", lambda: "mac.wifi.example")
    told: list[str] = []
    with RunLock(tmp_path / "run.lock", waiting=told.append):
        assert told == []


def test_who_waits_for_an_owner_that_may_live_is_told_so(tmp_path):
    with RunLock(tmp_path / "run.lock"):
        record = (tmp_path / "run.lock").read_text()
    gone = record.replace(current_owner().boot, "before-the-restart")
    (tmp_path / "run.lock").write_text(gone)
    told: list[str] = []
    lock = RunLock(tmp_path / "run.lock", stale_seconds=0.3, beat_seconds=0.05, waiting=told.append)
    with lock:
        (line,) = told
    assert f"had {tmp_path}" in line
    assert "waiting 0.3 s" in line


@pytest.mark.parametrize("refuses", [False, True])
def test_what_is_to_survive_a_power_loss_leaves_the_drives_cache(monkeypatch, tmp_path, refuses):
    """macOS's fsync leaves it there; F_FULLFSYNC does not, and exFAT and SMB do not know it."""
    calls: list[str] = []

    def command(fd: int, number: int) -> int:
        assert number == 51
        calls.append("full")
        if refuses:
            raise OSError(45, "Operation not supported")
        return 0

    real = os.fsync
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", command)
    monkeypatch.setattr(atomic.os, "fsync", lambda fd: calls.append("fsync") or real(fd))
    write_atomic(tmp_path / "file", b"content")
    assert calls == ["full", *(["fsync"] if refuses else [])] * 2  # the file, and its name
    with (tmp_path / "file").open() as file:
        monkeypatch.delattr(fcntl, "F_FULLFSYNC")
        calls.clear()
        sync_descriptor(file.fileno())
    assert calls == ["fsync"]
