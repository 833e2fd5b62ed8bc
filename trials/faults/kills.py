"""Trials of the battery: a process of the run is killed, from outside or by itself."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from trials.faults.oracle import assert_same_run
from trials.faults.planted import DieInSave, In, LateWrites, SlowDisk
from trials.faults.trial import (
    PATIENCE_SECONDS,
    Trial,
    assert_checkpoints_whole,
    join,
    kill,
    last_step,
    wait_for_step,
)

MOST_OPERATIONS = {0: 44, 1: 12}
"""By rank: the operations of a save that is waited for, with the removal of an old checkpoint, and
a few more."""


def before_an_operation(trial: Trial) -> str:
    """SIGKILL before each operation of a save that training waits for; one rank or two."""
    return _kill_in_save(trial, {"checkpoint.asynchronous": False})


def before_an_operation_beside_training(trial: Trial) -> str:
    """The same of a save beside training; one checkpoint is kept, and writing begins late."""
    settings = {"checkpoint.asynchronous": True, "checkpoint.keep_last": 1}
    return _kill_in_save(trial, settings, LateWrites(2))


def _kill_in_save(trial: Trial, settings: dict, *late: LateWrites) -> str:
    n_ranks = 2 if trial.number % 3 == 2 else 1
    victim = trial.draw.randrange(n_ranks)
    if n_ranks > 1:
        settings = {**settings, "parallel.data": 2, "parallel.zero": trial.draw.choice([0, 1])}
    whole = trial.undisturbed(n_ranks, **settings)
    n = 1 + trial.number % MOST_OPERATIONS[victim]
    die = DieInSave(save=trial.draw.randint(1, 8), n=n)
    codes = join(trial.start(whole.config, n_ranks, [*late, die], victim))
    assert codes[victim] in (-signal.SIGKILL, 0), codes  # 0: fewer operations were left
    assert all(code in (0, 70) for rank, code in enumerate(codes) if rank != victim), codes
    assert_checkpoints_whole(trial.run)
    trial.finish(whole, n_ranks)
    return f"save {die.save}, operation {n}, rank {victim} of {n_ranks}, {codes[victim]}"


def at_a_random_moment(trial: Trial) -> str:
    """SIGKILL of the whole run, up to three times in a row, whatever it is doing."""
    n_ranks = 2 if trial.number % 4 == 3 else 1
    settings = {"parallel.data": n_ranks} if n_ranks > 1 else {}
    beside = trial.draw.choice([True, False])
    whole = trial.undisturbed(n_ranks, **settings, **{"checkpoint.asynchronous": beside})
    steps = []
    for _ in range(trial.draw.randint(1, 3)):
        processes = trial.start(whole.config, n_ranks)
        processes[0].join(trial.moment(whole))
        kill(processes)
        steps.append(last_step(trial.run))
        assert_checkpoints_whole(trial.run)
    trial.finish(whole, n_ranks)
    return f"after steps {steps}, {n_ranks} ranks"


def segfault(trial: Trial) -> str:
    """A segmentation fault in C code, anywhere in a step or a save; one rank or two."""
    n_ranks = 1 + trial.number % 2
    whole = trial.undisturbed(n_ranks, **({"parallel.data": 2} if n_ranks > 1 else {}))
    phase = trial.draw.choice(["step", "accumulation", "optimizer", "saving", "evaluation"])
    fault = In(phase, trial.draw.randint(1, 4), "segfault")
    victim = trial.draw.randrange(n_ranks)
    codes = join(trial.start(whole.config, n_ranks, [fault], victim))
    assert codes[victim] == -signal.SIGSEGV, codes
    assert all(code == 70 for rank, code in enumerate(codes) if rank != victim), codes
    assert_checkpoints_whole(trial.run)
    trial.finish(whole, n_ranks)
    return f"in {phase}, rank {victim} of {n_ranks}"


def on_a_slow_disk(trial: Trial) -> str:
    """Each disk operation takes up to 20 ms more; the run is killed there, and ends there."""
    whole = trial.undisturbed(**{"checkpoint.asynchronous": trial.number % 2 == 0})
    slow = SlowDisk(trial.draw.uniform(0.002, 0.02))
    processes = trial.start(whole.config, planted=[slow])
    processes[0].join(trial.moment(whole, 0.2, 4.0))
    kill(processes)
    step = last_step(trial.run)
    assert_checkpoints_whole(trial.run)
    codes = join(trial.start(whole.config, planted=[slow]))
    assert codes == [0], codes
    assert_same_run(trial.run, whole.run)
    return f"{1e3 * slow.seconds:.0f} ms, killed after step {step}"


# -- by the kernel, for its memory ----------------------------------------------------------------

CGROUPS = Path("/sys/fs/cgroup/memory")


def no_memory_limit() -> str | None:
    """Why this machine cannot limit a group's memory (cgroup v1 or v2); None where it can."""
    try:
        with _memory_limit(1 << 30):
            return None
    except OSError as error:
        return f"no right to limit a group's memory (cgroups): {error.strerror}"


@contextmanager
def _memory_limit(n_bytes: int):
    """A control group whose processes may take so much memory; its file of processes."""
    is_v1 = CGROUPS.is_dir()
    group = (CGROUPS if is_v1 else CGROUPS.parent) / f"pentameter-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(n_bytes))
        yield group / "cgroup.procs"
    finally:
        deadline = time.monotonic() + 5
        while True:
            try:
                group.rmdir()
                break
            except OSError as error:  # a process in it is not quite gone
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def out_of_memory(trial: Trial) -> str:
    """The kernel kills a rank that takes more memory than its control group may have."""
    n_ranks = 1 + trial.number % 2
    whole = trial.undisturbed(n_ranks, **({"parallel.data": 2} if n_ranks > 1 else {}))
    phase = trial.draw.choice(["step", "optimizer", "saving", "evaluation"])
    fault = In(phase, trial.draw.randint(1, 4), "memory")
    victim = trial.draw.randrange(n_ranks)
    with _memory_limit(1 << 30) as members:
        joins = JoinGroup(members)
        codes = join(trial.start(whole.config, n_ranks, [joins, fault], victim))
    assert codes[victim] == -signal.SIGKILL, codes
    assert all(code == 70 for rank, code in enumerate(codes) if rank != victim), codes
    assert_checkpoints_whole(trial.run)
    trial.finish(whole, n_ranks)
    return f"in {phase}, rank {victim} of {n_ranks}"


class JoinGroup:
    """A process puts itself into a control group."""

    def __init__(self, members: Path) -> None:
        self.members = members

    def __call__(self) -> None:
        self.members.write_text(str(os.getpid()))


# -- under torchrun -------------------------------------------------------------------------------

LONGER = {
    "parallel.data": 2,
    "model.context_length": 64,
    "model.d_model": 64,
    "model.n_layers": 4,
    "train.batch_size": 16,
}
"""Some 0.1 s a step, so that a fault strikes a run that still has something to do."""


def torchrun(trial: Trial, config: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start torchrun with two workers that train."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    train = ["--nproc-per-node", "2", "-m", "pentameter", "train", str(config)]
    with (trial.folder / "stderr").open("ab") as stderr:
        return subprocess.Popen(
            [*command, *train, "--run-dir", str(trial.run)],
            stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip


def workers(agent: int) -> list[int]:
    """Process ids of an agent's workers, by rank."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    ranks = {}
    for child in children:
        for variable in Path(f"/proc/{child}/environ").read_text().split("\0"):
            if variable.startswith("RANK="):
                ranks[int(variable[5:])] = int(child)
    return [ranks[rank] for rank in sorted(ranks)]


def a_worker_under_torchrun(trial: Trial) -> str:
    """A worker is killed; torchrun restarts both, and within 15 s a step is made. Time in which a
    worker waited for a core, because other programs had them, does not count."""
    whole = trial.undisturbed(2, **LONGER)
    agent = torchrun(trial, whole.config, "--max-restarts", "3", "--monitor-interval", "0.1")
    try:
        wait_for_step(trial.run, trial.draw.randint(3, 30))
        victim = trial.draw.randrange(2)
        os.kill(workers(agent.pid)[victim], signal.SIGKILL)
        killed = time.monotonic()
        lost = log_of(trial.run)
        while log_of(trial.run).startswith(lost) and agent.poll() is None:
            assert time.monotonic() < killed + PATIENCE_SECONDS, "no step is made any more"
            time.sleep(0.02)
        step = last_step(trial.run)
        while last_step(trial.run) == step and agent.poll() is None:
            time.sleep(0.02)
        seconds = time.monotonic() - killed
        waited = max(map(seconds_without_core, workers(agent.pid)), default=0.0)
        assert agent.wait(PATIENCE_SECONDS) == 0, (trial.folder / "stderr").read_text()
    finally:
        end_session(agent)
    assert_same_run(trial.run, whole.run)
    told = f"the next step {seconds:.1f} s later, {waited:.1f} of them without a core"
    assert seconds - waited < 15, told
    return f"rank {victim}; {told}"


def seconds_without_core(pid: int) -> float:
    """Seconds that a process could have run, and other programs had the cores; 0 where Linux does
    not count them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def log_of(run: Path) -> bytes:
    """metrics.jsonl, which is cut when a run resumes."""
    return (run / "metrics.jsonl").read_bytes()


def the_agent_of_torchrun(trial: Trial) -> str:
    """The agent is killed: its workers leave within 30 s, and nothing is lost."""
    whole = trial.undisturbed(2, **LONGER)
    agent = torchrun(trial, whole.config)
    try:
        wait_for_step(trial.run, trial.draw.randint(1, 10))
        left = workers(agent.pid)
        agent.kill()
        killed = time.monotonic()
        while any(is_running(pid) for pid in left):
            assert time.monotonic() < killed + 30, "a worker outlives its agent by 30 s"
            time.sleep(0.02)
        seconds = time.monotonic() - killed
    finally:
        end_session(agent)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    steps = last_step(trial.run)
    trial.finish(whole, 2)
    return f"workers left {seconds:.1f} s later, at step {steps}"


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a session that was started here."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
