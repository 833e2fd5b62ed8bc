"""The process that workers are forked from, and what a worker does.

Importing torch and what trains with it takes seconds of processor time; here that is paid once,
and a worker that is spoilt is replaced in no time. Forking is safe because the nursery computes
nothing: it has a single thread, and torch has started none.

A request over the control socket is a line: `fork`, with the worker's end of its connection, is
answered by its process id; `end PID` by its exit code, after SIGKILL where it still runs.
Everything here ends when the process that asks is gone, however it went.
"""

from __future__ import annotations

import gc
import os
import queue
import shutil
import signal
import socket
import threading
import traceback
from multiprocessing.connection import Connection
from typing import NoReturn

from pentameter.processes.lost import LostProcessError
from pentameter.verify.job import Failed, Job

REQUEST_BYTES = 64


def tend(control_fd: int, folder: str) -> None:
    """Serve requests until nobody is left to make any; then nobody needs `folder` either."""
    import pentameter.verify.steps  # noqa: F401 - what every worker needs

    gc.collect()
    gc.freeze()  # what is never written to is shared with the workers
    control = socket.socket(fileno=control_fd)
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, REQUEST_BYTES, 1)
        if not request:
            shutil.rmtree(folder, ignore_errors=True)
            return
        word, _, pid = request.decode().partition(" ")
        if word == "fork":
            (own_end,) = descriptors
            answer = _fork(control, own_end)
            os.close(own_end)
        else:
            os.kill(int(pid), signal.SIGKILL)  # a zombie until the next line, so never another's
            answer = os.waitstatus_to_exitcode(os.waitpid(int(pid), 0)[1])
        control.sendall(str(answer).encode())


def _fork(control: socket.socket, own_end: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        control.close()
        _work(Connection(own_end))
    finally:
        os._exit(1)


def _work(connection: Connection) -> NoReturn:
    """Do one job after another; their results, or what they failed with, go back."""
    from pentameter.verify.steps import perform

    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, jobs), daemon=True).start()
    while True:
        job = jobs.get()
        answer: object
        try:
            answer = perform(job)
        except BaseException as error:
            last = traceback.format_exception_only(error)[-1].strip()
            consequence = isinstance(error, LostProcessError)
            answer = Failed(last, traceback.format_exc(), consequence)
        connection.send(answer)
        del answer, job
        gc.collect()  # groups, meshes and modules of the last case refer to each other


def _listen(connection: Connection, jobs: queue.SimpleQueue) -> None:
    """Take jobs, and end the process, whatever it is in the middle of, when none can come."""
    while True:
        try:
            jobs.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)
