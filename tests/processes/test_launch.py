"""What the environment says of a process's place, and meeting by it under torchrun and SLURM."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError
from pentameter.machine.cores_and_memory import n_usable_cores
from pentameter.processes.failures.failure import (
    LostProcessError,
    failure_ends_process,
    lost_process,
    tell_failure,
)
from pentameter.processes.failures.waiting import Naming, Wait
from pentameter.processes.group.join import joined_world, local_device, loss_behind
from pentameter.processes.group.rank import (
    LaunchedRank,
    expand_counts,
    find_rank,
    first_node,
    rendezvous_port,
)
from pentameter.processes.group.world import World
from pentameter.train.loop import Trainer

LAUNCHED = Path(__file__).with_name("launched.py")
EACH_THREADS = max(1, n_usable_cores() // 2)
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
POD = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "6", "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_STEP_NODELIST": "gpu[09-10],fat3",
}  # fmt: skip


def test_nothing_set_is_one_process():
    assert find_rank({}) is None


def test_torchrun_names_the_place():
    assert find_rank(TORCHRUN) == LaunchedRank(5, 8, 1, 4, "env://", "torchrun")


def test_torchrun_inside_srun_is_torchrun():
    assert find_rank({**SRUN, **TORCHRUN}) == find_rank(TORCHRUN)


def test_a_pod_of_a_pytorchjob_holds_one_process():
    assert find_rank(POD) == LaunchedRank(2, 3, 0, 1, "env://", "environment")


def test_srun_names_the_place():
    port = rendezvous_port(SRUN)
    assert find_rank(SRUN) == LaunchedRank(6, 9, 2, 4, f"tcp://gpu09:{port}", "SLURM")
    given = {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "1234"}
    launched = find_rank({**SRUN, **given})
    assert launched is not None
    assert launched.init_method == "tcp://[fe80::1]:1234"


def test_a_batch_script_may_name_what_srun_says_too():
    # As many tutorials do, before srun: export MASTER_ADDR=… MASTER_PORT=… WORLD_SIZE=$SLURM_NTASKS
    exported = {"MASTER_ADDR": "gpu09", "MASTER_PORT": "29500", "WORLD_SIZE": "9"}
    assert find_rank({**SRUN, **exported}) == LaunchedRank(6, 9, 2, 4, "tcp://gpu09:29500", "SLURM")
    assert find_rank({**SRUN, "WORLD_SIZE": ""}) == find_rank(SRUN)  # SLURM_NTASKS was not set


def test_ports_differ_between_steps():
    ports = {
        rendezvous_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        for job in range(100, 120)
        for step in range(20)
    }
    assert len(ports) == 400
    assert min(ports) >= 10_000
    assert rendezvous_port({"SLURM_JOB_ID": "99999999", "SLURM_STEP_ID": "4294967290"}) < 30_000


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"},  # a batch script
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
    ids=["batch script", "srun of one task", "world of one"],
)
def test_one_process_has_nobody_to_meet(environ):
    assert find_rank(environ) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCHRUN, "RANK": "eight"}, ["RANK='eight'", "whole number", "unset RANK"]),
        ({**TORCHRUN, "RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK='-1'"]),
        ({"RANK": "0"}, ["WORLD_SIZE is not set"]),
        ({"WORLD_SIZE": "2"}, ["RANK is not set"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9", "WORLD_SIZE=8"]),
        ({**POD, "LOCAL_RANK": "0"}, ["LOCAL_WORLD_SIZE is not set"]),
        ({**POD, "MASTER_ADDR": ""}, ["MASTER_ADDR is not set"]),
        ({**POD, "MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
        ({**POD, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "1 to 65535"]),
        ({**SRUN, "MASTER_PORT": "0"}, ["MASTER_PORT=0", "1 to 65535"]),
        ({**POD, "PET_NPROC_PER_NODE": "8"}, ["PET_NPROC_PER_NODE=8", "torchrun -m pentameter"]),
        ({**SRUN, "SLURM_PROCID": "x"}, ["SLURM_PROCID='x'", "srun"]),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4"}, ["TASKS_PER_NODE='4'", "NUM_TASKS=9"]),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "four"}, ["TASKS_PER_NODE='four'", "2(x3),1"]),
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu[9-"}, ["SLURM_STEP_NODELIST='gpu[9-'"]),
        (
            {**SRUN, "WORLD_SIZE": "18"},
            ["WORLD_SIZE=18", "SLURM_STEP_NUM_TASKS=9", "--ntasks=18", "unset WORLD_SIZE"],
        ),
        ({**SRUN, "WORLD_SIZE": "all"}, ["WORLD_SIZE='all'", "unset WORLD_SIZE"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_SIZE=2", "torchrun or srun"]),
        ({"SLURM_STEP_NUM_TASKS": "2"}, ["SLURM_STEP_NUM_TASKS=2", "run as one process"]),
        ({**SRUN, "SLURM_PROCID": "3"}, ["SLURM_PROCID=3", "--distribution=block"]),
    ],
)
def test_contradictions_name_the_variable_and_the_way_out(environ, words):
    with pytest.raises(ConfigError) as caught:
        find_rank(environ)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node7", "node7"),
        ("node[001-003,007],gpu3", "node001"),
        ("fat3,node[001-003]", "fat3"),
        ("a[9-11]", "a9"),
        ("r[1-2]n[01-02]-ib", "r1n01-ib"),
    ],
)
def test_the_first_of_a_list_of_nodes(text, host):
    assert first_node(text) == host


@pytest.mark.parametrize("text", ["", "node[1-2", "node[a-b]", "a b", "node]1["])
def test_what_is_no_list_of_nodes(text):
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST"):
        first_node(text)


def test_counts_of_tasks():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("8") == [8]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def outside(**variables: object) -> dict[str, str]:
    """This environment without a launcher's variables, and with others."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMP_"))}
    return {**kept, "GLOO_SOCKET_IFNAME": "lo", **{k: str(v) for k, v in variables.items()}}


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", "2", str(LAUNCHED), *map(str, arguments)],
        capture_output=True, text=True, timeout=100, check=False, env=outside(),
    )  # fmt: skip


MET = f"ranks [(0, 0, 2), (1, 1, 2)] sum 3.0 threads [{EACH_THREADS}, {EACH_THREADS}]"


def test_torchrun_really_joins(tmp_path):
    done = torchrun("meet", tmp_path)
    assert done.returncode == 0, done.stderr
    assert MET in done.stdout


def test_torchrun_restarts_meet_again():
    """Its agent's store keeps the addresses of the dead attempt, which gloo must not find."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(LAUNCHED), "rejoin", "1"],
        capture_output=True, text=True, timeout=100, check=False, env=outside(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "attempt 1: sum 3.0\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_of_a_killed_agent_stop_as_after_sigterm(tmp_path):
    """Nobody would start them again: they save what they have and leave."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    agent = subprocess.Popen(
        [*command, "--nproc-per-node", "2", str(LAUNCHED), "outlive", str(tmp_path)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=outside(),
    )  # fmt: skip
    try:
        pids = [int(read_when_there(tmp_path / f"pid-{rank}")) for rank in range(2)]
    finally:
        agent.kill()
        agent.wait()
    assert [read_when_there(tmp_path / f"signal-{rank}") for rank in range(2)] == ["SIGTERM"] * 2
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a worker outlives its agent"
        time.sleep(0.05)


def read_when_there(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.02)
    return path.read_text()


def test_torchrun_shows_the_root_cause_once():
    done = torchrun("lose", "raise")
    assert done.returncode == 1
    assert done.stderr.count("ValueError: the planted bug") == 1
    assert "closed by peer" not in done.stderr
    assert "rank      : 1 (local_rank: 1)" in done.stderr


def slurm_tasks(environ, *arguments):
    tasks = [
        subprocess.Popen(
            [sys.executable, LAUNCHED, *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=outside(**environ, SLURM_PROCID=rank, SLURM_LOCALID=rank),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        ended = [(*task.communicate(timeout=60), task.returncode) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    return ended


@pytest.fixture
def step():
    """What srun would say to two tasks on this machine."""
    return {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": free_port(),
    }  # fmt: skip


def test_srun_really_joins(step, tmp_path):
    (out_0, err_0, code_0), (out_1, _, code_1) = slurm_tasks(step, "meet", tmp_path)
    assert (code_0, code_1) == (0, 0), err_0
    assert out_0 == f"{MET}\n"
    assert out_1 == "also a word\n"


def test_without_a_launcher_each_rank_tells_its_own_failure(step):
    (_, err_0, code_0), (_, err_1, code_1) = slurm_tasks(step, "lose", "raise")
    assert (code_0, code_1) == (70, 1)
    assert re.match(
        r"pentameter: rank 1 went away while starting, before the all-reduce over all ranks of "
        r"lose \(launched\.py:\d+\); look for its message\. ",
        err_0,
    )
    assert err_0.count("\n") == 1
    assert err_1.startswith("Traceback (most recent call last)")
    assert err_1.endswith("\npentameter: rank 1: ValueError: the planted bug\n")


def test_ctrl_c_during_the_import_of_torch_is_told_as_such(monkeypatch, capsys):
    for name, value in {**POD, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "torch", None)  # its parts outlive an import that was cut off
    assert "torch.distributed" in sys.modules
    assert tell_failure(KeyboardInterrupt())
    assert capsys.readouterr().err == "pentameter: interrupted\n"


def test_a_script_that_fails_ends_without_waiting_for_the_others(step):
    (_, err_0, code_0), (_, err_1, code_1) = slurm_tasks(step, "script")
    assert err_0.startswith("pentameter: rank 1 went away")  # and not: does not answer
    assert (code_0, code_1) == (70, 1)
    assert err_0.count("\n") == 1
    assert err_1.startswith("Traceback (most recent call last)")
    assert err_1.endswith("\npentameter: rank 1: ValueError: the planted bug\n")


def test_a_script_of_one_process_fails_as_any_other():
    with pytest.raises(ValueError, match="on its own"), failure_ends_process():
        raise ValueError("on its own")


def test_who_waits_for_others_says_so(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr("pentameter.processes.group.join.SAY_AFTER_SECONDS", 0.2)
    launched = LaunchedRank(0, 2, 0, 2, f"file://{tmp_path}/meeting", "torchrun")
    with (
        pytest.raises(LostProcessError, match="not all of the 2 processes"),
        joined_world("cpu", launched, timeout_seconds=1),
    ):
        pass
    expected = f"pentameter: waiting for rank 1 of 2 to come to file://{tmp_path}/meeting\n"
    assert capfd.readouterr().err.count(expected) == 1


def test_a_trainer_without_a_world_refuses_to_be_one_of_several(monkeypatch):
    for name, value in {**POD, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"no world: with joined_world"):
        Trainer(load_config("grammar"))
    assert Trainer(load_config("grammar"), world=World()).world == World()


def test_one_process_needs_no_group():
    with joined_world("cpu") as world:
        assert world == World()
        assert not dist.is_initialized()


def test_threads_get_the_interpreter_before_the_process_may_end(monkeypatch):
    """Gloo's want its lock to let go of the last tensors, and abort where Python has ended: of ten
    scripts under torchrun that left no other occasion eight did."""
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    may_run, has_run = threading.Lock(), threading.Event()
    may_run.acquire()

    def let_go():
        with may_run:
            has_run.set()

    thread = threading.Thread(target=let_go, daemon=True)
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(60)
        with joined_world("cpu", always_group=True):
            thread.start()
            may_run.release()
        settled = has_run.is_set()
    finally:
        sys.setswitchinterval(interval)
        monkeypatch.undo()
        dist.destroy_process_group()
    assert settled


def test_one_process_can_have_a_group():
    with joined_world("cpu", always_group=True, timeout_seconds=7) as world:
        assert world == World(timeout_seconds=7)
        assert dist.get_world_size() == 1
        dist.all_reduce(torch.ones(1))
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="leaves"), joined_world("cpu", always_group=True):
        raise ValueError("leaves")
    assert not dist.is_initialized()


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_who_does_not_come_is_waited_for_in_vain(tmp_path, scheme):
    where = tmp_path / "a?b#c" if scheme == "file" else f"127.0.0.1:{free_port()}"
    launched = LaunchedRank(0, 2, 0, 2, f"{scheme}://{where}", "SLURM")
    with (
        pytest.raises(LostProcessError, match="not all of the 2 processes that SLURM names came"),
        joined_world("cpu", launched, timeout_seconds=1),
    ):
        raise AssertionError("nobody came")


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        launched = LaunchedRank(0, 2, 0, 2, f"tcp://127.0.0.1:{port}", "SLURM")
        with (
            pytest.raises(ConfigError, match=f"{port} is in use.*MASTER_PORT"),
            joined_world("cpu", launched, timeout_seconds=1),
        ):
            raise AssertionError("it cannot listen there")


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (
            RuntimeError("[/x/pair.cc:553] Connection closed by peer [::1]:7. This is typically …"),
            "gone",
        ),
        (
            RuntimeError("[/x/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation"),
            "late",
        ),
        (RuntimeError("shapes (2, 3) and (4, 5) do not match"), None),
        (OSError(32, "Broken pipe"), None),
    ],
)
def test_what_only_follows_from_another_process(error, how):
    assert lost_process(error) == how


def test_a_failure_while_leaving_after_a_loss_is_the_loss():
    error = RuntimeError("the group is damaged")
    error.__context__ = RuntimeError("Connection reset by peer")
    assert lost_process(error) is not None


def fake_gpus(monkeypatch, n_gpus, uuids=None):
    class Properties:
        def __init__(self, index):
            self.uuid = (uuids or range(n_gpus))[index]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)


class FakeWorld(World):
    """Two processes of a machine, of which the other one sees the GPU `other`."""

    other = "1"

    def all_gather(self, value):
        return [value, self.other]


def test_the_device_is_that_of_the_local_rank(monkeypatch):
    world = FakeWorld(rank=2, size=4, local_rank=0, local_size=2)
    cuda = torch.device("cuda")
    fake_gpus(monkeypatch, 8)
    assert local_device(cuda, world) == torch.device("cuda", 0)
    assert local_device(torch.device("cpu"), world) == torch.device("cpu")
    assert local_device(cuda, World()) == cuda
    fake_gpus(monkeypatch, 1, ["own"])  # the scheduler shows each process its own GPU
    assert local_device(cuda, FakeWorld(3, 4, 1, 2)) == torch.device("cuda", 0)


@pytest.mark.parametrize(("n_gpus", "local_size"), [(1, 2), (2, 3)])
def test_too_few_gpus(monkeypatch, n_gpus, local_size):
    fake_gpus(monkeypatch, n_gpus, ["1", "2"])
    with pytest.raises(ConfigError, match=rf"{local_size} processes in this machine and {n_gpus}"):
        local_device(torch.device("cuda"), FakeWorld(0, 4, 0, local_size))


def test_one_device_is_not_shared():
    with pytest.raises(ConfigError, match=r"--train\.device cpu"):
        local_device(torch.device("mps"), World(0, 2, 0, 2))


def test_several_that_do_not_tell_need_not_all_be_lost(tmp_path):
    stores = [dist.FileStore(str(tmp_path / "store")) for _ in range(2)]
    worlds = [World(rank, 4, rank, 4, 7.0, store=store) for rank, store in enumerate(stores)]
    worlds[0].activity.note("training", 17)
    gone = RuntimeError("[/x/pair.cc:553] Connection closed by peer [::1]:7")
    told = str(loss_behind(gone, worlds[0]))
    assert told.startswith("at least one of ranks 1, 2 and 3 went away in step 17 (training); look")
    stores[1].set("misses-another/2", "1")
    stores[1].set("misses-another/3", "1")
    told = str(loss_behind(RuntimeError("Timed out waiting 7000ms for recv"), worlds[1]))
    assert told.startswith("no answer within 7 s (parallel.timeout_seconds) while starting, and no")
    assert loss_behind(RuntimeError("shapes do not match"), worlds[0]) is None
    assert loss_behind(ValueError("Connection closed by peer"), worlds[0]) is None


def test_a_local_variable_that_cannot_be_looked_at_hides_no_loss(tmp_path):
    class Odd(Naming):
        def of(self, local):
            raise ValueError("no such attribute")

    world = World(0, 2, 0, 2, 7.0, store=dist.FileStore(str(tmp_path / "store")))
    world.activity.naming = Odd()
    try:
        raise RuntimeError("Connection closed by peer [::1]:7")
    except RuntimeError as error:
        lost = loss_behind(error, world)
    assert isinstance(lost, LostProcessError)
    assert str(lost).startswith("rank 1 went away while starting; look for its message")
    assert lost.wait is None


def test_a_rank_that_others_waited_for_did_not_go_away(tmp_path):
    """Those that time out first close their connections, which a third takes for the loss."""
    store = dist.FileStore(str(tmp_path / "store"))
    store.set("misses-another/2", Wait("barrier", timed_out=True).to_json())
    try:
        raise RuntimeError("Connection closed by peer [::1]:7")
    except RuntimeError as error:
        lost = loss_behind(error, World(0, 3, 0, 3, 7.0, store=store))
    assert str(lost).startswith("rank 1 did not answer within 7 s (parallel.timeout_seconds)")
