from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from pentameter.disk import lock as lock_module
from pentameter.disk.lock import RunLock, is_held
from pentameter.disk.owner import current_owner, process_start
from pentameter.errors import RunFolderInUseError

HOLD = """
import sys, time
from pathlib import Path
from pentameter.disk.lock import RunLock
with RunLock(Path(sys.argv[1]), beat_seconds=0.05):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""

TRY = """
import sys
from pathlib import Path
from pentameter.disk.lock import RunLock
from pentameter.errors import PentameterError
try:
    with RunLock(Path(sys.argv[1]), beat_seconds=0.05, stale_seconds=0.4):
        print("held", flush=True)
        sys.stdin.read()
except PentameterError as error:
    sys.exit(error.exit_code)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "x" / "run.lock"


@pytest.fixture
def hold():
    """Start a process that holds a lock; ended with the test."""
    started = []

    def start(path, code=HOLD, seconds=60):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def quick(path):
    return RunLock(path, beat_seconds=0.05, stale_seconds=0.4)


def test_a_second_run_is_refused_and_told_who_owns_the_folder(path, hold):
    process = hold(path)
    assert process.stdout.readline() == "held\n"
    named = rf"{re.escape(str(path.parent))} .* process {process.pid} on {socket.gethostname()}"
    with pytest.raises(RunFolderInUseError, match=named) as caught, quick(path):
        pass
    assert caught.value.exit_code == 73
    assert "--run-dir" in str(caught.value)
    assert process.poll() is None


def test_a_second_lock_in_the_same_process_is_refused(path):
    with quick(path), pytest.raises(RunFolderInUseError, match=str(os.getpid())), quick(path):
        pass
    with quick(path):  # and free again
        pass


def test_a_killed_owners_lock_is_taken_over_at_once(path, hold):
    for _ in range(3):
        process = hold(path)
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert path.exists()
        start = time.monotonic()
        with RunLock(path):
            assert json.loads(path.read_text())["pid"] == os.getpid()
        assert time.monotonic() - start < 5


def test_leaving_removes_the_file_and_ends_the_beat(path):
    before = threading.active_count()
    with quick(path):
        assert path.exists()
        assert threading.active_count() == before + 1
    assert not path.exists()
    assert threading.active_count() == before
    lock = quick(path)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), lock:
            raise ZeroDivisionError
    lock.release()  # twice does nothing
    with lock, pytest.raises(RuntimeError, match="already held"):
        lock.acquire()


def test_an_exit_without_leaving_hangs_on_nothing(path, hold):
    code = HOLD.replace("with RunLock", "lock = RunLock")
    code = code.replace(":\n    print", "\nlock.acquire()\nif True:\n    print")
    process = hold(path, code, seconds=0)
    assert process.wait(timeout=20) == 0
    with quick(path):
        pass


def test_one_of_many_wins(path, hold):
    processes = [hold(path, TRY) for _ in range(8)]
    winners = [process for process in processes if process.stdout.readline() == "held\n"]
    assert len(winners) == 1
    assert sorted(p.wait() for p in processes if p is not winners[0]) == [73] * 7
    winners[0].stdin.close()
    assert winners[0].wait() == 0
    winners[0].stdin = None
    assert not path.exists()


def test_the_beat_moves(path):
    def beat():
        return json.loads(path.read_text())["beat"]

    with quick(path):
        first = beat()
        deadline = time.monotonic() + 5
        while beat() == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"{}", b"[1]", b'{"beat": 1}', b"\xff\xfe"])
def test_a_torn_record_is_nobodys(path, content):
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with quick(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def write_owner(path, owner, beat=0):
    from dataclasses import asdict

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(json.dumps({"beat": beat, **asdict(owner)}).encode().ljust(4096))


def test_a_silent_owner_on_another_machine_is_taken_over_after_a_while(path):
    write_owner(path, replace(current_owner(), host="elsewhere", boot="other"))
    os.utime(path, (4e9, 4e9))  # clocks and times say nothing
    assert not is_held(path, watch_seconds=0.4)
    start = time.monotonic()
    with quick(path):
        assert time.monotonic() - start > 0.35
        assert json.loads(path.read_text())["host"] == socket.gethostname()


def test_a_beating_owner_on_another_machine_is_left_alone(path):
    owner = replace(current_owner(), host="elsewhere", boot="other")
    write_owner(path, owner)
    os.utime(path, (0, 0))
    stop = threading.Event()

    def beat():
        n_beats = 0
        while not stop.wait(0.02):
            n_beats += 1
            with open(path, "r+b") as file:
                text = json.dumps({"beat": n_beats, **owner.__dict__}).encode().ljust(4096)
                os.pwrite(file.fileno(), text, 0)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunFolderInUseError, match="on elsewhere"), quick(path):
            pass
        assert is_held(path)
    finally:
        stop.set()
        thread.join()


def test_a_reused_process_number_or_a_restart_does_not_keep_the_folder(path):
    me = current_owner()
    for owner in (
        replace(me, pid=os.getppid(), process_start=me.process_start + 1),
        replace(me, pid=2**22 + 1),
        me,  # our own, from before an exec: the kernel dropped its lock
    ):
        write_owner(path, owner)
        assert is_held(path) == (owner is me)  # who reads does not take `flock` to see
        with quick(path):
            pass


def test_who_asks_whether_a_lock_is_held_leaves_it_alone(path, hold):
    assert not is_held(path)
    process = hold(path)
    process.stdout.readline()
    before = path.stat().st_ino
    assert is_held(path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not is_held(path)
    assert path.stat().st_ino == before
    path.write_bytes(b"{}")
    assert not is_held(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert not is_held(path)


@pytest.fixture
def no_flock(monkeypatch):
    """A file system without locks: only the record speaks."""

    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_flock_the_record_decides(path, no_flock, hold):
    me = current_owner()
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = process_start(living.pid)
        write_owner(path, replace(me, pid=living.pid, process_start=start))
        with pytest.raises(RunFolderInUseError, match=f"process {living.pid} "), quick(path):
            pass
        write_owner(path, replace(me, pid=living.pid, process_start=start + 1))
        with quick(path):  # another process had that number
            pass
        write_owner(path, replace(me, pid=living.pid, process_start=start))
        living.kill()  # a zombie until it is waited for
        deadline = time.monotonic() + 10
        while process_start(living.pid) != -1 and time.monotonic() < deadline:
            time.sleep(0.01)
        with quick(path), pytest.raises(RunFolderInUseError), quick(path):
            pass
        assert not path.exists()
    finally:
        living.kill()
        living.communicate()


def test_a_forked_child_neither_releases_nor_keeps_the_lock(path):
    """Workers of a killed owner must not hold the folder, those of a living one not free it."""
    reading, writing = os.pipe()
    owner = os.fork()
    if owner == 0:
        lock = quick(path)
        lock.acquire()
        child = os.fork()
        if child == 0:
            lock.release()  # as an exception that unwinds the child would
            os.write(writing, b"%d\n" % os.getpid())
            time.sleep(60)
            os._exit(0)
        second = os.fork()
        if second == 0:  # keeps the descriptor open
            os.write(writing, b"%d\n" % os.getpid())
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    children = []
    try:
        with os.fdopen(reading) as lines:
            children = [int(lines.readline()), int(lines.readline())]
        with pytest.raises(RunFolderInUseError, match=f"process {owner} "), quick(path):
            pass
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        with quick(path):
            assert json.loads(path.read_text())["pid"] == os.getpid()
            with pytest.raises(RunFolderInUseError), quick(path):
                pass
    finally:
        os.close(writing)
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def test_a_lock_file_that_is_a_link_is_not_followed(path, tmp_path):
    from pentameter.errors import StorageError

    (tmp_path / "victim").write_text("precious")
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "victim")
    with pytest.raises(StorageError, match=r"run\.lock"), quick(path):
        pass
    assert (tmp_path / "victim").read_text() == "precious"


def test_clocks_are_not_asked(path, monkeypatch, hold):
    process = hold(path)
    process.stdout.readline()
    for jump in (-1e9, 0.0, 1e9):
        monkeypatch.setattr(time, "time", lambda jump=jump: 1.7e9 + jump)
        os.utime(path, (1.7e9 - jump, 1.7e9 - jump))
        assert is_held(path)
        with pytest.raises(RunFolderInUseError), quick(path):
            pass


# -- an owner that stood still, and was replaced -------------------------------------------------


def frozen_and_replaced(path, monkeypatch):
    """Return two locks: of an owner on another machine that stands still, and of its successor."""
    own = current_owner()
    monkeypatch.setattr(lock_module, "current_owner", lambda: replace(own, boot="a", token="1"))
    first = RunLock(path, beat_seconds=1000)
    first.acquire()
    monkeypatch.setattr(lock_module, "current_owner", lambda: replace(own, boot="b", token="2"))
    second = quick(path)
    second.acquire()
    return first, second


def test_a_fence_tells_an_owner_that_it_was_replaced(path, no_flock, monkeypatch):
    first, second = frozen_and_replaced(path, monkeypatch)
    second.fence.check()
    named = f"process {os.getpid()} on .* has taken over {re.escape(str(path.parent))}"
    with pytest.raises(RunFolderInUseError, match=named) as caught:
        first.fence.check()
    assert caught.value.exit_code == 73
    first.release()
    assert path.exists()  # it is the other's
    fence = second.fence
    second.release()
    with pytest.raises(RunFolderInUseError, match=r"run\.lock is gone"):
        fence.check()


def test_a_late_beat_of_a_replaced_owner_is_not_seen(path, no_flock, monkeypatch):
    """Also of one that was frozen after it had looked."""
    first, second = frozen_and_replaced(path, monkeypatch)
    lock_module._write_record(first._fd, first.fence.owner, 7)
    second.fence.check()
    assert json.loads(path.read_text())["token"] == "2"
    first._beat.close()
    first.release()
    second.release()


def test_a_replaced_owner_beats_no_more(path, no_flock, monkeypatch):
    own = current_owner()
    with quick(path) as lock:
        lock_module._write_record(lock._fd, replace(own, boot="b"), 3)  # as earlier versions did
        lock._beat._thread.join(10)
        assert not lock._beat._thread.is_alive()
        assert json.loads(path.read_text())["beat"] == 3
    assert path.exists()


def test_a_fence_reads_no_half_written_beat_as_another_owner(path):
    with RunLock(path, beat_seconds=0.0001) as lock:
        for _ in range(3000):
            lock.fence.check()


def test_a_lock_that_cannot_be_read_says_nothing(path, monkeypatch):
    from pentameter.errors import StorageError

    with quick(path) as lock:
        with monkeypatch.context() as patched:
            for number in (errno.EIO, errno.ESTALE):

                def fail(*arguments, number=number):
                    raise OSError(number, os.strerror(number))

                patched.setattr(os, "pread", fail)
                with pytest.raises(StorageError, match="cannot read"):
                    lock.fence.check()
        lock.fence.check()


def test_another_rank_may_see_the_lock_released_and_not_taken_over(path, no_flock, monkeypatch):
    first, second = frozen_and_replaced(path, monkeypatch)
    with pytest.raises(RunFolderInUseError, match="has taken over"):
        replace(first.fence, is_owner=False).check()
    fence = replace(second.fence, is_owner=False)
    second.release()
    fence.check()
    first._beat.close()
    first.release()
