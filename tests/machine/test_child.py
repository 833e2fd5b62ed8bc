"""Child processes: clean, gone with their parent, and with a reason for their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pentameter.machine.child as child_module
from pentameter.errors import ConfigError, exit_reason
from pentameter.machine.child import (
    LIFELINE,
    ChildEndedError,
    ForkServer,
    PythonChild,
    end_with_parent,
)

HERE = Path(__file__).parent
ME = Path(__file__).stem


@pytest.fixture(autouse=True)
def found_by_children(monkeypatch):
    """A child has its parent's search path, and so finds the functions of this file."""
    monkeypatch.syspath_prepend(HERE)


def answerer(word=""):
    return lambda request: answer(request, word)


def answer(request, word=""):
    if request == "refuse":
        raise ConfigError("the number must be even")
    if request == "facts":
        return word, os.getpid(), sorted(os.environ), [*sys.path], "torch" in sys.modules
    if request == "start":
        return subprocess.Popen(["sleep", "600"]).pid
    if request == "hang":
        time.sleep(600)
    os._exit(request)


def printed(line):
    print(line, flush=True)
    return 4


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_function_answers_in_a_clean_interpreter():
    child = PythonChild(f"{ME}:answerer", "a word")
    try:
        word, pid, names, path, has_torch = child.ask("facts")
        assert (word, pid) == ("a word", child.pid)
        assert LIFELINE not in names
        assert not has_torch
        assert not {"", os.getcwd()} & set(path)
        assert os.getsid(child.pid) == child.pid
        with pytest.raises(ConfigError, match="must be even"):
            child.ask("refuse")
        with pytest.raises(ChildEndedError, match="ended with exit code 3") as caught:
            child.ask(3)
        assert caught.value.code == 3
    finally:
        child.close()  # a second time does no harm


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_that_still_runs_is_killed_with_what_it_started():
    child = PythonChild(f"{ME}:answerer")
    started = child.ask("start")
    child.connection.send("hang")
    assert exit_reason(child.close()) == "was killed by SIGKILL (out of memory?)"
    deadline = time.monotonic() + 20
    while is_alive(started):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(params=[True, False], ids=["forked", "fresh"])
def forks(request, monkeypatch):
    """Workers are forked, and, as on macOS, fresh interpreters."""
    monkeypatch.setattr(child_module, "forks", lambda: request.param)
    return request.param


def test_a_process_with_torch_is_not_forked_on_macos(monkeypatch):
    assert child_module.forks() == (sys.platform != "darwin")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not child_module.forks()
    assert "start server" in ForkServer._role(None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_are_ended(forks):
    server = ForkServer(ME)
    try:
        workers = [server.fork(f"{ME}:answer") for _ in range(2)]
        for worker in workers:
            worker.connection.send("facts")
            facts = worker.connection.recv()
            assert facts[1] == worker.pid
            assert LIFELINE not in facts[2]
            assert os.getsid(worker.pid) == server.pid
        first, second = workers
        first.connection.send(5)
        with pytest.raises((EOFError, OSError)):
            first.connection.recv()
        assert server.end(first) == 5
        assert is_alive(second.pid)
        assert server.end(second) == -signal.SIGKILL
        assert not is_alive(second.pid)
        parent = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert (b"fork server" in parent) == forks
    finally:
        server.close()


def test_a_worker_runs_to_its_end_and_prints_where_it_is_told(forks, tmp_path):
    with (tmp_path / "said").open("wb") as output:
        server = ForkServer(ME)
        try:
            child = server.start(f"{ME}:printed", "a line", output.fileno())
            deadline = time.monotonic() + 60
            while (code := child.poll()) is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            server.close()
    assert code == 4
    assert (tmp_path / "said").read_text() == "a line\n"


def test_a_fork_server_that_cannot_start_says_why(tmp_path):
    with (tmp_path / "said").open("wb") as output:
        server = ForkServer("no_such_module", output=output)
    with pytest.raises(ChildEndedError, match="ended with exit code 1"):
        server.fork("anything")
    assert "No module named 'no_such_module'" in (tmp_path / "said").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_children_end_with_their_parent_in_the_middle_of_their_work(tmp_path, number, forks):
    script = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "import time; from pathlib import Path\n"
        "from pentameter.machine.child import *\n"
        f"import pentameter.machine.child as module; module.forks = lambda: {forks}\n"
        f"folder = Path({str(tmp_path)!r}, 'folder'); folder.mkdir()\n"
        f"child = PythonChild('{ME}:answerer', folder=folder)\n"
        f"server = ForkServer('{ME}', folder=folder)\n"
        f"worker = server.fork('{ME}:answer')\n"
        "child.connection.send('hang'); worker.connection.send('hang')\n"
        "print(child.pid, server.pid, worker.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3
    assert all(map(is_alive, pids))
    parent.send_signal(number)
    parent.wait(20)
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) or (tmp_path / "folder").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["json", "numpy", "pentameter", "multiprocessing"])
def test_modules_in_the_current_folder_are_not_run(tmp_path, name):
    planted = tmp_path / f"{name}.py"
    script = (
        "import sys; from pathlib import Path\n"
        "from pentameter.machine.child import PythonChild\n"
        "import json, multiprocessing, numpy\n"  # the parent has its own by now
        f"sys.path.insert(0, {str(HERE)!r}); sys.path.insert(0, '')\n"
        f"Path({str(planted)!r}).write_text('raise SystemExit(9)')\n"
        f"child = PythonChild('{ME}:answerer', 'fine')\n"
        "assert child.ask('facts')[0] == 'fine'\n"
        "child.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, check=False,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_process_that_nobody_minds_is_left_alone():
    assert end_with_parent({}) == ""


def test_reasons_of_an_end():
    assert exit_reason(9) == "ended with exit code 9"
    assert exit_reason(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert exit_reason(-99) == "was killed by signal 99"
