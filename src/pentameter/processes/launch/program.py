"""Programs that a launcher starts once for each rank: a command, or a function in a process that is
forked with torch imported; and the environment variables that say the rank."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pentameter.machine.child import Child, ChildEndedError, ForkedChild, ForkServer
from pentameter.machine.cores_and_memory import environment_of_one
from pentameter.processes.failures.flight_record import recorder_variables
from pentameter.processes.group.rank import LAUNCH_FOLDER


def python_command(*arguments: str) -> list[str]:
    """Return the command line that runs `pentameter ARGUMENTS` with this Python interpreter, which
    looks for modules in the current folder only if this process does."""
    # -P: the current folder may hold a user's `numpy.py`. But if this process found its own
    # modules there, as `python -m` does, its workers may do so, too.
    safe = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    return [sys.executable, *safe, "-m", "pentameter", *arguments]


class Program(Protocol):
    """Protocol of a program that a launcher starts once for each rank: a command, or a function in
    a forked process."""

    def start(
        self, environment: Mapping[str, str], folder: Path, output: int | None
    ) -> Child | ForkedChild:
        """Start a process with these environment variables. Raises OSError if the system cannot
        start it.

        folder: the launch folder; the started process removes it if the launcher is killed.
        output: file descriptor for its stdout and stderr; None for those of the launcher.
        """


class Command:
    """A command line, as a program that a launcher starts."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments

    def start(
        self, environment: Mapping[str, str], folder: Path, output: int | None
    ) -> Child | ForkedChild:
        """Start the command as one rank's process. Arguments and errors are as for
        `Program.start`."""
        return Child(self._arguments, environment, folder=folder, stdout=output, stderr=output)


class Preloaded:
    """A program that is a function. Each start calls it in a new process, forked from a server that
    has imported a module once, since importing torch takes seconds."""

    def __init__(self, module: str, function: str, n_processes: int) -> None:
        """module: the module that the server imports.
        function: `module:name`, called with (environment variables, arguments); it returns the exit
            code.
        n_processes: how many processes share the cores of this machine.
        """
        self.arguments: Sequence[str] = ()
        """Arguments of the processes to start next."""
        self._module, self._function, self._n_processes = module, function, n_processes
        self._server: ForkServer | None = None

    def start(
        self, environment: Mapping[str, str], folder: Path, output: int | None
    ) -> Child | ForkedChild:
        """Start one rank's process, forked from the fork server, which is started first if it does
        not run. Arguments and errors are as for `Program.start`."""
        if self._server is None or self._server.poll() is not None:
            self.close()
            # torch's C++ warns of every host without a reverse name, and shows its stack when a
            # store goes away, which our own message tells.
            quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
            own = environment_of_one(self._n_processes, quiet)
            self._server = ForkServer(self._module, environment=own, prints=True)
        request = dict(environment), list(self.arguments)
        try:
            return self._server.start(self._function, request, output)
        except ChildEndedError as error:
            raise OSError(errno.ECHILD, f"the fork server {error}") from error

    def close(self) -> None:
        """End the fork server, and every process that it has forked."""
        if self._server is not None:
            self._server.close()
            self._server = None


@dataclass(frozen=True)
class Launched:
    """The number of one process among those that are started together: its `rank` among
    `world_size` in the run, and its `local_rank` among `local_size` on this machine. The last two
    are None if the whole run is on this machine."""

    rank: int
    world_size: int
    local_rank: int | None = None
    local_size: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables, for a run on several machines. If there are none, the
    processes meet on this machine over its loopback interface."""


def worker_environment(
    process: Launched, folder: Path, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment variables of a worker process: `environ`, and on top of it
    torch.distributed's rank variables, the launch folder, the thread count and the settings of
    NCCL's flight recorder. If all processes are on this machine, gloo and NCCL are told to use the
    loopback interface."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    local_rank = process.rank if process.local_rank is None else process.local_rank
    local_size = process.local_size or process.world_size
    alone = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {
        **environment_of_one(local_size, environ),
        **recorder_variables(folder, environ),
        LAUNCH_FOLDER: str(folder),
        "RANK": str(process.rank),
        "WORLD_SIZE": str(process.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        **(process.variables or alone),
    }
