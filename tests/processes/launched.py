"""What the tests of launching start: `launch N ACTION …` starts workers, `ACTION …` is one.

Both are the command itself with its verbs replaced, so that failures take their real way.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

from pentameter.cli import main as cli
from pentameter.errors import ConfigError, InterruptedRunError
from pentameter.processes.failures import activity
from pentameter.processes.failures.activity import activity_path
from pentameter.processes.failures.failure import LostProcessError, failure_ends_process
from pentameter.processes.group.join import joined_world
from pentameter.processes.group.rank import LAUNCH_FOLDER, find_rank
from pentameter.processes.launch.local_launch import run_local
from pentameter.processes.launch.program import Command
from pentameter.processes.launch.stop_signals import STOP_SIGNALS
from pentameter.processes.launch.worker import watch_launcher
from pentameter.train.signals import StopSignals

activity.LEAST_TIMEOUT_SECONDS = float(os.environ.get("TEST_TIMEOUT_SECONDS", "30"))
GRACE_SECONDS = float(os.environ.get("TEST_GRACE_SECONDS", "0.5"))


def rank() -> int:
    launched = find_rank()
    assert launched is not None
    return launched.rank


def meet(folder: str) -> None:
    """Say what the group looks like from rank 0; with a file `wait`, until there is a file `go`."""
    import torch
    import torch.distributed as dist

    with joined_world("cpu", find_rank()) as world:
        ranks = world.all_gather((world.rank, world.local_rank, world.local_size))
        pair = dist.new_group([0, 1])
        total = torch.tensor([float(world.rank + 1)])
        dist.all_reduce(total, group=pair)
        threads = world.all_gather(torch.get_num_threads())
        print(f"a word\nfrom {world.rank}", file=sys.stderr)
        if world.is_main:
            print(f"ranks {ranks} sum {total.item()} threads {threads}", flush=True)
        else:
            print("also a word")
        Path(folder, f"pid-{world.rank}").write_text(str(os.getpid()))
        while Path(folder, "wait").exists() and not Path(folder, "go").exists():
            time.sleep(0.02)
    assert not dist.is_initialized()


def rejoin(n_deaths: str) -> None:
    """Rank 1 is killed in each of the first attempts that torchrun makes; the next one goes on."""
    import torch
    import torch.distributed as dist

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with joined_world("cpu", find_rank()) as world:
        total = torch.tensor([float(world.rank + 1)])
        dist.all_reduce(total)
        if attempt < int(n_deaths):
            if world.rank == 1:
                _plant("kill")
            dist.all_reduce(total)
        if world.is_main:
            print(f"attempt {attempt}: sum {total.item()}")


def outlive(folder: str) -> None:
    """Work until a signal comes, and say which."""
    with StopSignals() as signals, joined_world("cpu", find_rank()) as world:
        signals.nothing_to_lose = False
        Path(folder, f"pid-{world.rank}").write_text(str(os.getpid()))
        while signals.received is None:
            time.sleep(0.02)
        Path(folder, f"signal-{world.rank}").write_text(signals.received)


def step(folder: str) -> None:
    """Make short steps, for which rank 0 waits, until there is a file `go`; 5 s are too long."""
    import torch
    import torch.distributed as dist

    world = joined_world("cpu", find_rank(), timeout_seconds=5)
    with StopSignals() as signals, world as world:
        signals.nothing_to_lose = False
        word = None
        while signals.agree(world, word, step_seconds=0.1) is None:
            Path(folder, f"pid-{world.rank}").write_text(str(os.getpid()))
            time.sleep(0.1 * world.rank)
            dist.all_reduce(torch.ones(1))
            word = "enough" if Path(folder, "go").exists() else None


def freeze(folder: str, how: str) -> None:
    """Rank 1 hangs in its second step, asleep or stopped; rank 0 waits for it."""
    import torch
    import torch.distributed as dist

    with StopSignals() as signals, joined_world("cpu", find_rank()) as world:
        for step in range(2):
            world.activity.note("training", step)
            dist.all_reduce(torch.ones(1))
        signals.nothing_to_lose = False
        Path(folder, f"pid-{world.rank}").write_text(str(os.getpid()))
        if world.rank == 1:
            oversleep() if how == "asleep" else os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))


def oversleep() -> None:
    """A hang that no signal's handler ends."""
    while True:
        time.sleep(600)


def lose(how: str) -> None:
    """Rank 1 ends in the middle of the work of both, or stops working."""
    import torch
    import torch.distributed as dist

    timeout_seconds = 1 if how == "hang" else 30
    with joined_world("cpu", find_rank(), timeout_seconds=timeout_seconds) as world:
        for step in range(1_000_000):
            if step == 5 and world.rank == 1:
                _plant(how)
            dist.all_reduce(torch.ones(10))


def wait_on_nccl(*roles: str) -> None:
    """What becomes of a run on GPUs in which ranks wait for one that hangs; `roles` has each one's.
    All leave their records of NCCL's collectives. Then those that wait are aborted by PyTorch's
    watchdog, report that gloo lost somebody, or wait a little longer."""
    role = roles[rank()]
    path = activity_path(Path(os.environ[LAUNCH_FOLDER]), rank())
    activity.Activity(path, 600).note("training", 7)
    record = flight_record([*range(len(roles))], waits=role != "hangs")
    files = [Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{each}") for each in range(len(roles))]
    files[rank()].write_bytes(pickle.dumps(record))
    if role == "hangs":
        oversleep()
    while not all(each.exists() for each in files):  # a slow one would be taken for who hangs
        time.sleep(0.05)
    time.sleep(0.2)
    if role == "aborted":
        os.abort()
    if role == "reports":
        raise LostProcessError("at least one of all others did not answer")
    while True:  # as for a number of the device, which no frame shows
        time.sleep(1)


def flight_record(ranks: list[int], *, waits: bool) -> dict[str, object]:
    """What PyTorch's flight recorder writes (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp,
    version 2.10) of two all-reduces over `ranks`, of which the second is not done in a rank that
    waits; it began 3 s ago, and may take 2."""
    frames = [
        {"name": frame.name, "filename": frame.filename, "line": frame.lineno}
        for frame in reversed(traceback.extract_stack()[:-1])
    ]
    entries = [
        {
            "record_id": number,
            "pg_id": 1,
            "process_group": ("3", "tensor"),
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "op_id": number + 1,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": time.time_ns() - 3 * 10**9,
            "input_sizes": [[3]],
            "input_dtypes": ["Float"],
            "output_sizes": [[3]],
            "output_dtypes": ["Float"],
            "state": ("completed", "scheduled")[number],
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": number == 0,
            "timeout_ms": 2000,
            "is_p2p": False,
            "frames": frames,
        }
        for number in range(1 + waits)
    ]
    groups = {"3": {"name": "3", "desc": "tensor", "ranks": str(ranks)}}
    return {"version": "2.10", "entries": entries, "pg_config": groups, "pg_status": {}}


def record(folder: str) -> None:
    """Write what PyTorch's flight recorder remembers of rank 0 while it waits for rank 1."""
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    with joined_world("cpu", find_rank()) as world:
        group = dist.new_group([0, 1], group_desc="tensor")
        done = torch.ones(1)
        dist.all_reduce(done, group=group)
        if world.is_main:
            work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            Path(folder, "flight-0").write_bytes(
                _distributed_c10d._dump_fr_trace(True, True, False)
            )
        world.barrier()
        if not world.is_main:
            work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        work.wait()


def _plant(how: str) -> None:
    import torch.distributed as dist

    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(60)
    if how == "late":  # the other one notices before the reason is told
        dist.destroy_process_group()
        time.sleep(1)
    raise ValueError("the planted bug")


def refuse(who: str) -> None:
    """Some or all ranks meet an error that a person can act on; the others wait for nothing."""
    if who == "all" or rank() == 1:
        raise ConfigError("the number must be even")
    time.sleep(60)


def leave(code: str) -> None:
    """Rank 1 ends without a word."""
    if rank() == 1:
        os._exit(int(code))
    time.sleep(60)


def obey(folder: str, seconds: str = "0") -> None:
    """Stop as a run does: at the first signal after `seconds`, at the second at once."""
    received: list[int] = []

    def on_signal(number, frame):
        with Path(folder, f"signals-{rank()}").open("a") as file:
            file.write(f"{signal.Signals(number).name}\n")
        if received:
            os._exit(75)
        received.append(number)

    for number in STOP_SIGNALS:
        signal.signal(number, on_signal)
    Path(folder, f"pid-{rank()}").write_text(str(os.getpid()))
    while not received:
        time.sleep(0.02)
    end = time.monotonic() + float(seconds) * (1 + rank())
    while time.monotonic() < end:
        time.sleep(0.02)
    raise InterruptedRunError("stopped, and saved")


def gather(folder: str, minds_signals: str = "") -> None:
    """Rank 0 waits for the others to come; rank 1 is not ready to meet it, and never will be."""
    import torch.distributed  # noqa: F401  # what the world waits for is not this import

    with StopSignals() if minds_signals else nullcontext():
        Path(folder, f"pid-{rank()}").write_text(str(os.getpid()))
        if rank() == 1:
            time.sleep(600)
        with joined_world("cpu", find_rank()):
            raise AssertionError("nobody came")


def abort_at_end(folder: str) -> None:
    """End by SIGABRT whatever ended it, as with threads that PyTorch did not join."""
    atexit.register(os.abort)
    Path(folder, f"pid-{rank()}").write_text(str(os.getpid()))
    time.sleep(600)


def cling(folder: str) -> None:
    """Rank 1 fails; rank 0 heeds no signal, and has started a process of its own."""
    if rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(folder, "pid-child").write_text(str(child.pid))
        Path(folder, "pid-0").write_text(str(os.getpid()))
        time.sleep(600)
    while not Path(folder, "pid-0").exists():
        time.sleep(0.02)
    raise RuntimeError("the first to fail")


def script() -> NoReturn:
    """Not a verb but a program of somebody's: rank 1 fails while it still has something to send."""
    import torch
    import torch.distributed as dist

    with failure_ends_process(), joined_world("cpu", find_rank(), timeout_seconds=10) as world:
        world.barrier()
        if world.rank == 1:
            _unfinished = dist.all_reduce(torch.ones(1), async_op=True)
            raise ValueError("the planted bug")
        dist.recv(torch.ones(1), src=1)
    raise AssertionError("rank 1 sends nothing")


def act(verb: str, arguments: list[str]) -> int:
    if verb == "launch":
        n_processes, *rest = arguments
        command = [sys.executable, __file__, *rest]
        run_local(Command(command), int(n_processes), grace_seconds=GRACE_SECONDS)
    else:
        watch_launcher()
        globals()[verb](*arguments)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "script":
        script()
    cli._run_verb = act
    raise SystemExit(cli.main())
