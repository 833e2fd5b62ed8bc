"""`--nproc N`: processes that meet over loopback, fail once, stop together and leave nobody."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pentameter.errors import InterruptedRunError
from pentameter.machine.cores_and_memory import chosen_threads, fair_thread_count, n_usable_cores
from pentameter.processes.failures.failure import Failure, WorkerFailedError, first_failure
from pentameter.processes.launch.local_launch import _relay, respawn, run_local
from pentameter.processes.launch.program import Command, Launched, worker_environment

LAUNCHED = Path(__file__).parents[1] / "launched.py"
N_CORES = n_usable_cores()
LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def launch(tmp_path):
    """Start `launch N ACTION …`; whatever still runs at the end is ended."""
    started = []

    def start(
        *arguments: object, orphaned: bool = False, **variables: str
    ) -> subprocess.Popen[str]:
        (tmp_path / "tmp").mkdir(exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), **variables}
        environment.pop("OMP_NUM_THREADS", None)
        process = subprocess.Popen(
            [sys.executable, LAUNCHED, *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
            # A session of its own has no shell, which a process group alone leaves it.
            **({"start_new_session": True} if orphaned else {"process_group": 0}),
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for file in tmp_path.glob("pid-*"):
        with suppress(OSError):
            os.kill(int(file.read_text()), signal.SIGKILL)
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a launcher that ends by itself."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def wait_for(*files: Path) -> list[int]:
    """What `files` hold where they are named for process ids, once they are written."""
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, f"{files} are not all there"
        time.sleep(0.02)
    return [int(file.read_text()) if "pid" in file.name else 0 for file in files]


def wait_until_suspended(*pids: int) -> None:
    deadline = time.monotonic() + 30
    while {Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in pids} != {"T"}:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_dead(*pids: int) -> None:
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process outlives the launch"
        time.sleep(0.05)


def listening_addresses(pid: int) -> list[str]:
    """Local addresses, in the kernel's hexadecimal, of the sockets on which a process listens."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(descriptor))
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # 0A: LISTEN
                found.append(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as the kernel prints them on a little-endian machine."""


@LINUX_ONLY
def test_workers_meet_over_loopback_and_leave_nothing(launch, tmp_path):
    (tmp_path / "wait").touch()
    launcher = launch("launch", 2, "meet", tmp_path)
    pids = wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    addresses = [listening_addresses(pid) for pid in (*pids, launcher.pid)]
    (tmp_path / "go").touch()
    code, out, err = end(launcher)
    assert code == 0, err
    each = max(1, N_CORES // 2)
    assert out == f"ranks [(0, 0, 2), (1, 1, 2)] sum 3.0 threads [{each}, {each}]\n"
    assert sorted(err.splitlines()) == [
        "a word", "from 0", "rank 1: a word", "rank 1: also a word", "rank 1: from 1"
    ]  # fmt: skip
    assert addresses[0], "gloo listens somewhere, or this test looks at nothing"
    assert addresses[1]
    assert not addresses[2]
    assert set(addresses[0] + addresses[1]) <= LOOPBACK
    assert not list((tmp_path / "tmp").iterdir())
    wait_until_dead(*pids)


def test_a_line_that_names_its_rank_is_not_named_twice(capsys):
    _relay(1, iter(["rank 1: warning: odd\n", "a word\n"]))
    assert capsys.readouterr().err == "rank 1: warning: odd\nrank 1: a word\n"


@pytest.mark.parametrize("how", ["raise", "late"])
def test_a_failure_is_told_once_and_not_its_consequence(launch, how):
    code, out, err = end(launch("launch", 2, "lose", how, TEST_GRACE_SECONDS="20"))
    assert code == 1
    assert out == ""
    assert err.count("Traceback (most recent call last)") == 1
    assert err.count("ValueError: the planted bug") == 2  # of the traceback, and the last line
    assert err.splitlines()[-1] == "pentameter: rank 1: ValueError: the planted bug"
    assert "closed by peer" not in err


def test_a_killed_worker_is_named(launch):
    code, _, err = end(launch("launch", 2, "lose", "kill"))
    assert code == 70
    assert err == (
        "pentameter: rank 1: was killed by SIGKILL (out of memory?); "
        "the same command goes back to the last checkpoint, or begins anew if there is none\n"
    )


def test_a_worker_that_hangs_is_given_up(launch):
    code, _, err = end(launch("launch", 2, "lose", "hang"))
    assert code == 70
    *shown, message = err.splitlines()
    assert message.startswith(
        "pentameter: rank 1 did not answer within 1 s (parallel.timeout_seconds) while starting: "
        "it did not reach the all-reduce over all ranks of lose (launched.py:"
    )
    assert "where rank 0 waits. The same command" in message
    assert any("rank 0 waited at the all-reduce over all ranks of lose" in line for line in shown)
    assert any(
        re.search(r'rank 1:   File ".*launched.py", line \d+ in _plant', line) for line in shown
    )


@pytest.mark.parametrize("roles", ["aborted hangs aborted", "reports hangs waits"])
def test_who_hangs_is_named_where_others_wait_on_nccl(launch, roles):
    code, _, err = end(launch("launch", 3, "wait_on_nccl", *roles.split()))
    assert code == 70
    *shown, message = err.splitlines()
    assert re.fullmatch(  # on a busy machine another rank may say it first
        r"pentameter: (?:rank 2: )?rank 1 did not answer within 2 s "
        r"\(parallel\.timeout_seconds\) in step 7 \(training\): it did not reach the "
        r"all-reduce along tensor of wait_on_nccl "
        r"\(launched\.py:\d+\), where ranks 0 and 2 wait\. The same command goes back to the last "
        "checkpoint, or begins anew if there is none",
        message,
    )
    if "aborted" in roles:
        assert any("ranks 0 and 2 waited at the all-reduce along" in line for line in shown)
    stack = [line for line in shown if line.startswith('rank 1:   File "')]
    assert any(re.search(r"launched\.py\", line \d+ in oversleep", line) for line in stack)
    assert not any(line.startswith(("rank 0:   File", "rank 2:   File")) for line in shown)


def test_nobody_is_named_alone_where_all_are_aborted(launch):
    code, _, err = end(launch("launch", 2, "wait_on_nccl", "aborted", "aborted"))
    assert code == 70
    assert "no answer within 2 s (parallel.timeout_seconds) in step 7 (training)" in err
    assert "and no process hangs: is the network cut?" in err


@LINUX_ONLY
@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ("asleep", r'rank 1:   File ".*launched.py", line \d+ in oversleep'),
        ("stopped", r'is stopped(.|\n)*rank 1:   File ".*launched.py", line \d+ in freeze'),
    ],
)
def test_one_signal_ends_a_run_in_which_a_worker_hangs(launch, tmp_path, how, shown):
    launcher = launch("launch", 2, "freeze", tmp_path, how, TEST_TIMEOUT_SECONDS="1")
    pids = wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    time.sleep(0.3)  # until rank 0 waits in C++
    launcher.send_signal(signal.SIGTERM)
    code, _, err = end(launcher)
    assert code == 75
    *stacks, message = err.splitlines()
    assert re.fullmatch(
        r"pentameter: rank 1: stopped by SIGTERM, but rank 1 did nothing more for \d+ s in step 1 "
        r"\(training\) and had to be killed; the same command goes back to the last checkpoint, or "
        "begins anew if there is none",
        message,
    )
    assert re.search(shown, "\n".join(stacks))
    wait_until_dead(*pids)


def test_an_expected_error_ends_all_in_one_line(launch):
    code, _, err = end(launch("launch", 2, "refuse", "one"))
    assert (code, err) == (2, "pentameter: rank 1: the number must be even\n")


def test_an_error_of_all_is_that_of_rank_0(launch):
    code, _, err = end(launch("launch", 3, "refuse", "all"))
    assert (code, err) == (2, "pentameter: the number must be even\n")


def test_debug_shows_the_traceback_of_the_worker(launch):
    code, _, err = end(launch("--debug", "launch", 2, "refuse", "one"))
    assert code == 2
    assert err.count("Traceback (most recent call last)") == 1
    assert "in refuse" in err


def test_a_worker_that_leaves_without_a_word(launch):
    code, _, err = end(launch("launch", 2, "leave", 9))
    assert (code, err) == (9, "pentameter: rank 1: ended with exit code 9 and no report\n")


@LINUX_ONLY
def test_who_heeds_no_signal_is_killed_with_what_it_started(launch, tmp_path):
    code, _, err = end(launch("launch", 2, "cling", tmp_path))
    assert code == 1
    assert err.endswith("pentameter: rank 1: RuntimeError: the first to fail\n")
    wait_until_dead(*wait_for(tmp_path / "pid-0", tmp_path / "pid-child"))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_reaches_every_worker_once(launch, tmp_path, name):
    # Rank 1 takes longer to stop than the grace after a failure: a stop is none.
    launcher = launch("launch", 2, "obey", tmp_path, 0.8)
    wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    if name == "SIGINT":  # Ctrl-C goes to the whole group of the terminal
        os.killpg(launcher.pid, signal.SIGINT)
    else:
        launcher.send_signal(getattr(signal, name))
    code, _, err = end(launcher)
    assert (code, err) == (75, "pentameter: stopped, and saved\n")
    for rank in range(2):
        assert (tmp_path / f"signals-{rank}").read_text() == f"{name}\n"


def test_a_second_signal_leaves_at_once(launch, tmp_path):
    launcher = launch("launch", 2, "obey", tmp_path, 300)
    wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    launcher.send_signal(signal.SIGTERM)
    wait_for(tmp_path / "signals-0", tmp_path / "signals-1")
    launcher.send_signal(signal.SIGTERM)
    code, _, err = end(launcher)
    assert code == 75
    assert err == "pentameter: stopped at once by a second signal; the same command continues\n"


@pytest.mark.parametrize("minds_signals", [[], ["yes"]])
def test_ctrl_c_while_the_workers_meet_ends_all(launch, tmp_path, minds_signals):
    launcher = launch("launch", 2, "gather", tmp_path, *minds_signals)
    pids = wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    deadline = time.monotonic() + 60
    while not list((tmp_path / "tmp").glob("pentameter-*/rendezvous")):
        assert time.monotonic() < deadline, "rank 0 does not come to the rendezvous"
        time.sleep(0.02)
    time.sleep(0.5)  # from the file to the wait; a signal before it would prove nothing
    os.killpg(launcher.pid, signal.SIGINT)
    code, _, err = end(launcher)
    assert code == 75, err
    assert err == (
        "pentameter: stopped by SIGINT before the first step; the same command starts again\n"
    )
    wait_until_dead(*pids)


def test_ctrl_c_is_told_of_a_worker_that_dies_of_its_threads_after_it(launch, tmp_path):
    launcher = launch("launch", 2, "abort_at_end", tmp_path)
    wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    os.killpg(launcher.pid, signal.SIGINT)
    code, _, err = end(launcher)
    assert code == 75, err
    assert "stopped by SIGINT before the first step" in err


def test_a_signal_while_a_worker_is_being_started_reaches_it(monkeypatch):
    started = []

    class Signalled(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)  # the launcher does not know of the worker yet

    monkeypatch.setattr(subprocess, "Popen", Signalled)
    with pytest.raises(WorkerFailedError, match="stopped by SIGTERM before the first") as caught:
        run_local(Command([sys.executable, "-c", "import time; time.sleep(10)"]), 2)
    assert caught.value.exit_code == InterruptedRunError.exit_code
    assert [process.returncode for process in started] == [-signal.SIGTERM]


@LINUX_ONLY
def test_workers_end_with_a_launcher_that_is_killed(launch, tmp_path):
    launcher = launch("launch", 2, "obey", tmp_path, 300)
    pids = wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    launcher.kill()
    wait_until_dead(*pids)
    assert not list((tmp_path / "tmp").iterdir())


@LINUX_ONLY
def test_suspending_the_launcher_suspends_its_workers(launch, tmp_path):
    launcher = launch("launch", 2, "obey", tmp_path)
    pids = [launcher.pid, *wait_for(tmp_path / "pid-0", tmp_path / "pid-1")]
    launcher.send_signal(signal.SIGTSTP)
    wait_until_suspended(*pids)
    launcher.send_signal(signal.SIGCONT)
    launcher.send_signal(signal.SIGTERM)
    assert end(launcher)[0] == 75


@LINUX_ONLY
def test_suspended_workers_end_with_a_launcher_that_is_killed(launch, tmp_path):
    launcher = launch("launch", 2, "obey", tmp_path, 300)
    pids = [launcher.pid, *wait_for(tmp_path / "pid-0", tmp_path / "pid-1")]
    launcher.send_signal(signal.SIGTSTP)
    wait_until_suspended(*pids)
    launcher.kill()
    wait_until_dead(*pids[1:])
    assert not list((tmp_path / "tmp").iterdir())


@LINUX_ONLY
def test_ctrl_z_without_a_shell_that_could_resume_suspends_nobody(launch, tmp_path):
    launcher = launch("launch", 2, "obey", tmp_path, orphaned=True)
    wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    launcher.send_signal(signal.SIGTSTP)
    time.sleep(0.5)
    launcher.send_signal(signal.SIGTSTP)  # wait for no step
    time.sleep(0.5)
    launcher.send_signal(signal.SIGTERM)
    assert end(launcher)[0] == 75


@LINUX_ONLY
def test_a_pause_may_be_longer_than_processes_wait_for_each_other(launch, tmp_path):
    launcher = launch("launch", 2, "step", tmp_path)
    pids = [launcher.pid, *wait_for(tmp_path / "pid-0", tmp_path / "pid-1")]
    for _ in range(2):  # the second at once
        launcher.send_signal(signal.SIGTSTP)
        wait_until_suspended(*pids)
        time.sleep(7.0)
        launcher.send_signal(signal.SIGCONT)
    (tmp_path / "go").touch()
    assert end(launcher) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc", "0"], ["--nproc 0 must be at least 1"]),
        (["--nproc", "3", "--parallel.data=2"], ["parallel.data=2", "there are 3", "--nproc 2"]),
        (["--nproc", "3", "--parallel.tensor=3"], ["parallel.tensor=3", "model.attention.n_heads"]),
        (["--nproc", "2", "--parallel.pipelin=2"], ["parallel.pipelin", "parallel.pipeline"]),
    ],
)
def test_wrong_usage_is_told_once_by_the_command_itself(arguments, words):
    done = subprocess.run(
        [sys.executable, "-m", "pentameter", "train", "quickstart", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    reading, *said = done.stderr.splitlines()
    assert reading == "pentameter: reading quickstart …"
    assert sum(line.startswith("pentameter: ") for line in said) == 1
    assert "rank" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_nproc_beside_another_launcher_is_refused():
    group = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pentameter", "train", "quickstart", "--nproc", "2"],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **group},
    )  # fmt: skip
    assert done.returncode == 2
    assert "--nproc 2 starts processes, and environment has started 4 already" in done.stderr


def test_the_first_failure():
    lost = Failure(0, 70, "went away", 1.0, consequence=True)
    bug = Failure(1, 1, "boom", 2.0)
    stopped = Failure(2, 75, "stopped", 0.5)
    same = [Failure(rank, 2, "the same", 3.0 - rank) for rank in (2, 1, 0)]
    assert first_failure([lost, stopped, bug]) is bug
    assert first_failure([lost, stopped]) is stopped
    assert first_failure([lost]) is lost
    assert first_failure(same).rank == 0


def attempts(losses, n_restarts, *, may_shrink=True, n_processes=4):
    """Numbers of processes that `respawn` starts; each loss says how many checkpoints were saved
    before it, and after the last one an attempt succeeds."""
    started, left = [], list(losses)

    def start(n_processes, again):
        assert again == bool(started)
        started.append(n_processes)
        if left:
            raise WorkerFailedError(left.pop(0)[1])

    def progress():
        return sum(n for n, _ in losses[: len(started)])

    respawn(start, n_processes, n_restarts, may_shrink=may_shrink, progress=progress)
    return started


KILLED = Failure(1, 70, "was killed", 0.0, killed=True)


def test_a_lost_process_is_started_again():
    assert attempts([], 3) == [4]
    assert attempts([(1, KILLED), (1, KILLED)], 1) == [4, 4, 4]  # with progress between


def test_who_is_lost_again_is_left_out_until_the_next_checkpoint():
    assert attempts([(1, KILLED), (0, KILLED), (0, KILLED), (1, KILLED)], 3) == [4, 4, 3, 2, 4]
    assert attempts([(0, KILLED)] * 3, 3, may_shrink=False) == [4] * 4
    assert attempts([(0, KILLED)] * 3, 3, n_processes=1) == [1] * 4


def test_an_end_without_a_cure_is_raised():
    with pytest.raises(WorkerFailedError, match="was killed"):
        attempts([(0, KILLED)] * 3, 2)
    with pytest.raises(WorkerFailedError, match="too large"):
        attempts([(1, Failure(0, 2, "too large", 0.0))], 2)


def test_threads():
    cores = frozenset(range(8))
    assert fair_thread_count(cores, [cores] * 3) == 2
    assert fair_thread_count(cores, [cores] * 9) == 1
    # bound to cores of their own, as SLURM does
    assert fair_thread_count(frozenset({0, 1}), [frozenset({0, 1}), frozenset({2, 3})]) == 2
    assert chosen_threads({}) is None
    assert chosen_threads({"OMP_NUM_THREADS": "3"}) == 3
    assert chosen_threads({"OMP_NUM_THREADS": "1"}) == 1
    assert chosen_threads({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}) is None
    assert (
        worker_environment(Launched(0, 2), Path("x"), {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"]
        == "3"
    )
    assert worker_environment(Launched(0, 999), Path("x"), {})["OMP_NUM_THREADS"] == "1"
