"""Child processes that end when this process ends.

`Child` runs any command. `PythonChild` runs a function in this package that answers requests over a
connection. `ForkServer` is a PythonChild that imports a module once and forks workers from there;
on macOS, where what torch and the system's libraries have begun does not survive a fork, it starts
fresh interpreters instead.

Each leads a session, so that Ctrl-C reaches it through this process only, and holds the read end of
a pipe whose write end is here: the pipe closes when this process is gone, however it went. None has
the current folder on its search path. `multiprocessing` gives none of this: its children run the
user's script again, look for modules in the current folder first, and outlive a parent that was
killed while they compute.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from pentameter.errors import PentameterError, StorageError, TrainingFailedError, exit_reason

if TYPE_CHECKING:  # `--help` would feel the 10 ms of its import
    from multiprocessing.connection import Connection

LIFELINE = "PENTAMETER_LIFELINE"
"""Environment variable that a parent sets for its child: the file descriptor for a pipe that closes
when the parent is gone, then a space and the temporary folder to remove in that case."""

_LEAVING_SECONDS = 10.0
"""Longest wait, after a child has closed its connection, until it has exited."""

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PACKAGE = Path(__file__).parents[1]

# The child loads this very package, whichever others could be found.
_START = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("pentameter", sys.argv[1])
sys.modules["pentameter"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["pentameter"])
from pentameter.machine.child import serve
serve(*sys.argv[2:])
"""


class ChildEndedError(EOFError):
    """Raised when a child process ends before it has answered a request. `code` is its exit code,
    or the negative number of the signal that killed it."""

    def __init__(self, code: int) -> None:
        super().__init__(exit_reason(code))
        self.code = code


class Child:
    """A child process that runs `command`, and is killed when this process ends, however that
    happens."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] = os.environ,
        *,
        folder: Path | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the process, with nothing on its stdin. The command must call
        `end_with_parent` early.

        folder: a temporary folder that the child removes if this process is killed and cannot.
        environment, stdout, stderr, pass_fds: as for `subprocess.Popen`. Raises OSError if the
        system cannot start a process.
        """
        read_end, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                command,
                env={**environment, LIFELINE: f"{read_end} {folder or ''}"},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(read_end, *pass_fds),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)

    @property
    def pid(self) -> int:
        """Process id; the child's session and process group have the same one."""
        return self.process.pid

    def poll(self) -> int | None:
        """Return the exit code of a process that has ended, negative for a signal; None while it
        runs."""
        return self.process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; do nothing if it has ended."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the process and everything in its process group, unless it is
        known to have ended."""
        if self.process.returncode is None:  # so the id is still its own
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> int:
        """Kill the process if it still runs, wait for it, and return its exit code;
        negative for a signal."""
        self.kill()
        code = self.process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return code


class PythonChild(Child):
    """A fresh Python interpreter in which a function in this package answers requests, one at a
    time."""

    def _role(self) -> str:
        return "interpreter"

    def __init__(
        self,
        function: str,
        *arguments: str,
        environment: Mapping[str, str] = os.environ,
        folder: Path | None = None,
        output: IO[bytes] | None = None,
        prints: bool = False,
        task: str = "help this one",
    ) -> None:
        """Start the interpreter. It calls `function` (`module:name`) once, with `arguments`, and
        uses the callable that it gets to answer each request.

        output: file for the child's stdout and stderr; by default stderr is this process's, and
        stdout is discarded, or with `prints` this process's. environment: the child's variables.
        folder: a temporary folder that the child removes if this process is killed and cannot.
        task: what the child is for, in the message of the StorageError that is raised if no process
        can be started.
        """
        from multiprocessing import Pipe

        self.connection, theirs = Pipe()
        try:
            super().__init__(
                _command(self._role(), theirs.fileno(), function, *arguments),
                environment,
                folder=folder,
                stdout=output or (None if prints else subprocess.DEVNULL),
                stderr=output,
                pass_fds=[theirs.fileno()],
            )
        except OSError as error:
            raise StorageError(
                f"cannot start {sys.executable} to {task}: {error.strerror}; start again when "
                "fewer processes run"
            ) from error
        finally:
            theirs.close()

    def ask(self, request: Any) -> Any:
        """Send `request` (any picklable object) to the child, wait, and return its answer. Raises
        the PentameterError that the child raised, or ChildEndedError if it ended."""
        with self._end_raised():
            _send(self.connection, request)
            answer = self.connection.recv()
        if isinstance(answer, PentameterError):
            raise answer
        return answer

    @contextmanager
    def _end_raised(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):  # it may still be on its way out
                self.process.wait(_LEAVING_SECONDS)
            raise ChildEndedError(self.close()) from error

    def close(self) -> int:
        """Kill the process if it still runs, close the connection, and return its exit code;
        negative for a signal."""
        code = super().close()
        self.connection.close()
        return code


@dataclass(frozen=True)
class Forked:
    """A worker process that a ForkServer has forked."""

    pid: int
    connection: Connection
    """Connection over which it receives requests and sends answers."""


class ForkServer(PythonChild):
    """A Python interpreter that imports a module, the constructor's `function`, and then forks
    workers, which have it imported already.

    Importing torch takes seconds of processor time: here that is paid once. Forking is safe because
    the fork server computes nothing: it has a single thread, and torch has started none. Where
    forking is not safe (`forks`), each worker is a fresh interpreter that imports the module
    itself.
    """

    def _role(self) -> str:
        return "fork server" if forks() else "start server"

    def fork(self, function: str, output: int | None = None) -> Forked:
        """Fork a worker that answers each request by calling `function` (`module:name`) with it.
        `output` is the file descriptor for its stdout and stderr; None leaves it the fork server's.
        Raises ChildEndedError if the fork server has ended."""
        from multiprocessing import Pipe
        from multiprocessing.reduction import send_handle

        ours, theirs = Pipe()
        with theirs, self._end_raised():
            descriptors = [theirs.fileno(), *([] if output is None else [output])]
            _send(self.connection, (function, len(descriptors)))
            for descriptor in descriptors:
                send_handle(self.connection, descriptor, self.pid)
            return Forked(self.connection.recv(), ours)

    def start(self, function: str, request: Any, output: int | None = None) -> ForkedChild:
        """Fork a worker that calls `function` (`module:name`) with one request and exits with the
        code that this returns. `output` is as for `fork`. Raises ChildEndedError if the fork server
        has ended."""
        worker = self.fork(function, output)
        with suppress(OSError):  # it has ended already, which `poll` will tell
            worker.connection.send(request)
        return ForkedChild(self, worker)

    def end(self, worker: Forked) -> int:
        """Kill a worker if it still runs, and return its exit code. Raises ChildEndedError if the
        fork server has ended."""
        code: int = self.ask(worker.pid)
        worker.connection.close()
        return code


class ForkedChild:
    """A worker process forked by a ForkServer that answers one request and then ends; it has the
    methods of a Child."""

    def __init__(self, server: ForkServer, worker: Forked) -> None:
        self._server, self._worker = server, worker
        self._code: int | None = None
        self._is_awaited = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._worker.pid

    def poll(self) -> int | None:
        """Return the exit code of a process that has ended, negative for a signal; None while it
        runs."""
        if self._code is None and self._worker.connection.poll():
            answer = None
            with suppress(EOFError, OSError):  # it left without one
                answer = self._worker.connection.recv()
            self._code = self._end(answer)
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; do nothing if it is known to have ended. A signal's handler
        may call this."""
        if not self._is_awaited:  # so the id is still its own
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the process, unless it is known to have ended. What it has started ends
        with it."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> int:
        """Kill the process if it still runs, wait for it, and return its exit code; negative for a
        signal."""
        if self.poll() is None:
            self._code = self._end(None)
        assert self._code is not None
        return self._code

    def _end(self, answer: int | None) -> int:
        self._is_awaited = True
        try:
            code = self._server.end(self._worker)
        except ChildEndedError as error:  # the worker ends with it
            code = error.code
        return code if answer is None else answer


def forks() -> bool:
    """Return whether forking a process that has imported torch is safe on this system. On macOS it
    is not: the system ends such a child once it uses Objective-C, and Apple's GPU hangs in it."""
    return sys.platform != "darwin"


def _command(role: str, connection: int, function: str, *arguments: str) -> list[str]:
    """Return the command line of an interpreter that calls `serve` with a role, the file descriptor
    of its `connection`, this process's search path, a function's name and its arguments."""
    python = [sys.executable, "-P", "-c", _START, str(_PACKAGE / "__init__.py")]
    return [*python, role, str(connection), json.dumps(sys.path), function, *arguments]


# -- in the child -------------------------------------------------------------------------------


def end_with_parent(environ: MutableMapping[str, str] = os.environ) -> str:
    """From now on, kill this process and those that it has started as soon as its parent is gone.
    Call it in a process that `Child` started; elsewhere it does nothing.

    Return the temporary folder that is removed then; "" if there is none.
    """
    lifeline = environ.pop(LIFELINE, "")  # what this process starts has nothing to do with it
    descriptor, _, folder = lifeline.partition(" ")
    if descriptor:
        os.set_inheritable(int(descriptor), False)
        _go_on_without_parent()
        threading.Thread(target=_watch, args=(int(descriptor), folder), daemon=True).start()
    return folder


def serve(role: str, descriptor: str, path: str, *arguments: str) -> None:
    """Body of a process that `PythonChild` or `ForkServer` started: answer the parent's requests
    until it closes the connection.

    role: `interpreter`, `fork server`, `start server` or `worker`.
    descriptor: the connection's file descriptor, as text.
    path: the parent's `sys.path` as JSON; the current folder is left out.
    arguments: the function and its arguments, or the module to import.
    """
    from multiprocessing.connection import Connection

    # Where that one is in a folder of somebody's, which may hold a `numpy.py`, this one does not
    # look there. Beside the package may lie anything too: so that comes last.
    clean = [*sys.path]
    sys.path[:] = [
        each for each in json.loads(path) if each in clean or not _is_current_folder(each)
    ]
    if str(_PACKAGE.parent) not in sys.path:
        sys.path.append(str(_PACKAGE.parent))
    connection = Connection(int(descriptor))
    if role == "worker":
        _work(connection, *arguments)
    elif role != "interpreter":
        _serve_workers(connection, *arguments, forks=role == "fork server")
    else:
        folder = end_with_parent()
        function, *own_arguments = arguments
        _answer(connection, pkgutil.resolve_name(function)(*own_arguments))
        _end(folder)


def _serve_workers(connection: Connection, module: str, *, forks: bool) -> NoReturn:
    """Body of a fork server: answer requests on `connection` until it closes. A request is either
    (function name, number of descriptors), followed by the file descriptors of a worker's
    connection and perhaps its output: start a worker and send its process id. Or it is a process
    id: kill that worker and send its exit code.

    With `forks`, `module` is imported first, and workers are forked; otherwise they are fresh
    interpreters, and nothing is imported here.
    """
    from multiprocessing.connection import Connection
    from multiprocessing.reduction import recv_handle

    if forks:
        importlib.import_module(module)
        gc.collect()
        gc.freeze()  # what is never written to is shared with the workers
    os.set_inheritable(connection.fileno(), False)
    workers: set[int] = set()
    for request in _requests(connection):
        if isinstance(request, tuple):
            function, n_descriptors = request
            handle, *output = [recv_handle(connection) for _ in range(n_descriptors)]
            worker = os.fork() if forks else _started(handle, output, function)
            if not worker:
                if output:
                    _print_to(output[0])
                connection.close()
                _work(Connection(handle), function)
            for descriptor in (handle, *output):
                os.close(descriptor)
            workers.add(worker)
            connection.send(worker)
        else:
            workers.remove(request)
            connection.send(_kill(request))
    for worker in workers:  # which may hang, and write to the folder until they end
        _kill(worker)
    _end(os.environ[LIFELINE].partition(" ")[2])


def _started(connection: int, output: Sequence[int], function: str) -> int:
    """Start a fresh interpreter as a worker, in this process's group, and return its process id. It
    calls `function` for each request on the file descriptor `connection`; its stdout and stderr go
    to the descriptor in `output`, if there is one."""
    os.set_inheritable(connection, True)
    command = _command("worker", connection, function)
    to_output = [(os.POSIX_SPAWN_DUP2, each, name) for each in output for name in (1, 2)]
    return os.posix_spawn(command[0], command, os.environ, file_actions=to_output)


def _print_to(output: int) -> None:
    """Send this process's stdout and stderr to the file descriptor `output`."""
    for standard, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(output, standard)
        # The streams that are there may take it for the file that it was, where they can seek.
        setattr(sys, name, os.fdopen(standard, "w", buffering=1, closefd=False))


def _work(connection: Connection, function: str) -> NoReturn:
    """Run a worker until its connection closes, then exit: answer requests on `connection` by
    calling `function` (`module:name`). Never returns."""
    try:
        end_with_parent()
        _answer(connection, pkgutil.resolve_name(function))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _answer(connection: Connection, answer: Callable[[Any], Any]) -> None:
    """Send `answer(request)`, or the PentameterError that it raises, for each request, until the
    connection closes."""
    for request in _requests(connection):
        try:
            result = answer(request)
        except PentameterError as error:
            result = error
        connection.send(result)
        del request, result  # they may be large, and the next request may take its time


def _send(connection: Connection, value: Any) -> None:
    """Send a picklable value as `Connection.send` does, but not from a view of a buffer: the frames
    of an error hold it, and Python complains from 3.13 on when a cycle of references ends in it."""
    import pickle  # `--help` would feel it

    connection.send_bytes(pickle.dumps(value))


def _requests(connection: Connection) -> Iterator[Any]:
    """Yield each request received until the connection closes."""
    with suppress(EOFError, OSError):
        while True:
            yield connection.recv()


def _is_current_folder(entry: str) -> bool:
    """Return whether `entry`, from `sys.path`, is the current folder."""
    try:
        return os.path.abspath(entry) == os.getcwd()
    except OSError:  # that has been removed
        return not entry


def _kill(worker: int) -> int:
    """Kill the child process with id `worker`, wait for it, and return its exit code. Until waited
    for, its id is no other process's."""
    os.kill(worker, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def _go_on_without_parent() -> None:
    """On Linux, have the kernel resume this process when its parent ends. A suspended process would
    not notice that the pipe from its parent closes."""
    if sys.platform == "linux":
        import ctypes  # `--help` need not wait for it

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _watch(lifeline: int, folder: str) -> None:
    if os.read(lifeline, 1) == b"":
        _end(folder)


def _end(folder: str) -> NoReturn:
    """Kill this process and everything it started, because its parent is gone; first remove the
    temporary folder `folder` (empty text: none), since the parent cannot."""
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(TrainingFailedError.exit_code)
