"""This process's rank among those that were started together, read from the environment.

torchrun, SLURM's srun, a Kubernetes PyTorchJob and `--nproc` each start the same command several
times and give each process its rank in environment variables. If none is set, there is one process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pentameter.errors import ConfigError

LAUNCH_FOLDER = "PENTAMETER_LAUNCH_FOLDER"
"""Environment variable with the launch folder: the private one for `--nproc`, in which its
processes meet and leave their reports."""

STORE = "PENTAMETER_STORE"
"""Environment variable with HOST:PORT of the store in which the processes of several nodes meet;
`--nodes` sets it for an attempt."""

_FIRST_PORT, _N_PORTS = 10_000, 20_000  # below the ports that Linux gives to outgoing connections
_HOSTS = r"(?:[^,\[\]\s]|\[\d+[-,\d]*\])+"  # one item in a list of nodes, ranges and all


@dataclass(frozen=True)
class LaunchedRank:
    """This process's rank among the `world_size` processes that a launcher started together,
    `local_size` of them on this machine, and how they meet."""

    rank: int
    world_size: int
    local_rank: int
    """Rank among the processes on this machine."""
    local_size: int
    init_method: str
    """The address at which they meet, as for `init_process_group`: `env://`, `tcp://HOST:PORT` or
    `file://PATH`, with the path unescaped."""
    source: str
    """Who started the processes: `torchrun`, `SLURM`, `--nproc`, `--nodes` or `environment`
    (torch.distributed's variables set by something else)."""


def find_rank(environ: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Return the LaunchedRank (rank, sizes and how to meet) that a launcher has set in environment
    variables; None for a process that runs alone.

    Raises ConfigError, naming the variables, if they contradict each other, or if an unknown
    launcher has started several processes.
    """
    # srun alone sets the step's number of tasks: a batch script itself is one process.
    is_srun_task = "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ
    if LAUNCH_FOLDER in environ:
        meet = f"file://{os.path.join(environ[LAUNCH_FOLDER], 'rendezvous')}"
        source = "--nproc"
        if STORE in environ:
            meet, source = f"tcp://{environ[STORE]}", "--nodes"
        launched = _rank_in(environ, source, meet)
    # A batch script can export WORLD_SIZE for all its tasks, but not each task's RANK.
    elif "RANK" in environ or ("WORLD_SIZE" in environ and not is_srun_task):
        launched = _torch_rank(environ)
    elif is_srun_task:
        launched = _slurm_rank(environ)
    else:
        _refuse_unknown_launcher(environ)
        return None
    return None if launched.world_size == 1 else launched


find_place = find_rank
"""The name that `find_rank` had until 0.2, for scripts that import it."""


def processes_together(nproc: int | None, launched: LaunchedRank | None) -> int | None:
    """Return the number of processes that train together, or None if neither a launcher
    (`launched`) nor `--nproc` (`nproc`) says it. Raises ConfigError if `nproc` is below 1, or
    differs from the launcher's number: it would start processes in addition."""
    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc {nproc} must be at least 1")
    if launched is None:
        return nproc
    if nproc not in (None, launched.world_size):
        raise ConfigError(
            f"--nproc {nproc} starts processes, and {launched.source} has started "
            f"{launched.world_size} already; leave --nproc out"
        )
    return launched.world_size


def _refuse_unknown_launcher(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if variables of Open MPI, PMI or SLURM say that several processes were
    started but not which one this is: each would train alone."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        count = environ.get(name, "").strip()
        if count.isdecimal() and int(count) > 1:
            raise ConfigError(
                f"{name}={count} says that {count} processes were started together, and nothing "
                "says which of them this is; start them with torchrun or srun, or on one machine "
                f"with --nproc, or unset {name} to run as one process"
            )


def _torch_rank(environ: Mapping[str, str]) -> LaunchedRank:
    """Return the LaunchedRank in torch.distributed's variables, set by torchrun or a PyTorchJob.
    Raises ConfigError if some are missing or inconsistent."""
    per_pod = environ.get("PET_NPROC_PER_NODE", "1")
    if "TORCHELASTIC_RUN_ID" in environ:
        source = "torchrun"
    elif "LOCAL_RANK" not in environ and per_pod not in ("", "1"):
        raise ConfigError(
            f"PET_NPROC_PER_NODE={per_pod} asks for that many processes in each pod, and this one "
            "runs alone: let the pod's command be torchrun -m pentameter train …"
        )
    else:
        source = "environment"
    launched = _rank_in(environ, source, "env://")
    if launched.world_size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise ConfigError(
                    f"WORLD_SIZE={launched.world_size} processes are to meet, and {name} is not "
                    f"set; set it to that of rank 0, or start the command with torchrun"
                )
        _chosen_port(environ)
    return launched


def _slurm_rank(environ: Mapping[str, str]) -> LaunchedRank:
    """Return the LaunchedRank in SLURM's variables for a step that srun started. Raises ConfigError
    if some are missing or inconsistent, or ranks are not consecutive on each node."""
    remedy = "start the command with srun, or unset the SLURM_ variables to run as one process"
    rank = _number(environ, "SLURM_PROCID", remedy)
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS", remedy)
    local_rank = _number(environ, "SLURM_LOCALID", remedy)
    if environ.get("WORLD_SIZE"):
        exported = _number(environ, "WORLD_SIZE", "unset WORLD_SIZE: srun says it already")
        if exported != world_size:
            raise ConfigError(
                f"WORLD_SIZE={exported} contradicts SLURM_STEP_NUM_TASKS={world_size}, the tasks "
                f"of this step: start it with srun --ntasks={exported}, or unset WORLD_SIZE"
            )
    if world_size == 1:
        return LaunchedRank(0, 1, 0, 1, "", "SLURM")
    tasks = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID", remedy)
    if sum(tasks) != world_size or node >= len(tasks):
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']!r} does not fit "
            f"SLURM_STEP_NUM_TASKS={world_size} and SLURM_NODEID={node}; {remedy}"
        )
    if rank != sum(tasks[:node]) + local_rank:
        raise ConfigError(
            f"SLURM_PROCID={rank} is task {local_rank} of node {node}: SLURM deals the tasks out "
            "to the nodes in turn, and ranks that work closely together would be far apart; "
            "start with srun --distribution=block"
        )
    host = environ.get("MASTER_ADDR") or first_node(environ.get("SLURM_STEP_NODELIST", ""))
    port = rendezvous_port(environ)
    if environ.get("MASTER_PORT"):
        port = _chosen_port(environ)
    host = f"[{host}]" if ":" in host else host
    return LaunchedRank(rank, world_size, local_rank, tasks[node], f"tcp://{host}:{port}", "SLURM")


def _rank_in(environ: Mapping[str, str], source: str, init_method: str) -> LaunchedRank:
    """Return the LaunchedRank in RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, completed by
    `source` and `init_method`. Raises ConfigError if they are inconsistent."""
    remedy = "torchrun sets it; unset RANK and WORLD_SIZE to run as one process"
    if "LOCAL_RANK" in environ or "LOCAL_WORLD_SIZE" in environ:
        local_rank = _number(environ, "LOCAL_RANK", remedy)
        local_size = _number(environ, "LOCAL_WORLD_SIZE", remedy)
    else:  # a PyTorchJob's pod has one process
        local_rank, local_size = 0, 1
    rank, world_size = _number(environ, "RANK", remedy), _number(environ, "WORLD_SIZE", remedy)
    for name, number, of, count in (
        ("RANK", rank, "WORLD_SIZE", world_size),
        ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size),
    ):
        if number >= count:
            raise ConfigError(f"{name}={number} must be below {of}={count}; ranks count from 0")
    if local_size > world_size:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={local_size} of one machine cannot be more than WORLD_SIZE="
            f"{world_size} of all; set both, or unset both"
        )
    return LaunchedRank(rank, world_size, local_rank, local_size, init_method, source)


def _chosen_port(environ: Mapping[str, str]) -> int:
    port = _number(environ, "MASTER_PORT", "")
    if not 1 <= port <= 65535:
        raise ConfigError(f"MASTER_PORT={port} must be a TCP port, from 1 to 65535")
    return port


def _number(environ: Mapping[str, str], name: str, remedy: str) -> int:
    text = environ.get(name, "").strip()
    if text.isdecimal():
        return int(text)
    what = f"{name}={text!r} must be a whole number" if name in environ else f"{name} is not set"
    raise ConfigError(f"{what}{f'; {remedy}' if remedy else ''}")


# -- SLURM's notation: node[01-03,7] and 2(x3),1 -----------------------------------------------


def first_node(text: str) -> str:
    """Return the first host in SLURM's list `text`, like `node[001-003,7],gpu3`. Raises ConfigError
    if it cannot be read."""
    match = re.fullmatch(rf"({_HOSTS})(?:,{_HOSTS})*", text)
    if match is None:
        raise _unreadable("SLURM_STEP_NODELIST", text, "node[01-03,7],gpu3")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[1])


def expand_counts(text: str) -> list[int]:
    """Return the tasks on each node from SLURM's list `text`: `2(x3),1` is [2, 2, 2, 1]. Raises
    ConfigError if it cannot be read."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise _unreadable("SLURM_STEP_TASKS_PER_NODE", text, "2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def rendezvous_port(environ: Mapping[str, str]) -> int:
    """Return the TCP port at which a SLURM step's tasks meet, computed from job and step number:
    all tasks in a step get the same port, other steps on the machine another one."""
    digits = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(text) if text.isdecimal() else 0 for text in digits)
    return _FIRST_PORT + (31 * job + step) % _N_PORTS


def _unreadable(name: str, value: str, example: str) -> ConfigError:
    return ConfigError(
        f"{name}={value!r} cannot be read; srun writes it like {example}. Unset the SLURM_ "
        "variables to run as one process, or use torchrun"
    )
