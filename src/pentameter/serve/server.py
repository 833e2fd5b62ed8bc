"""An HTTP server at a bound socket that answers running requests before it stops."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from pentameter.machine.address import LOOPBACK, url_of
from pentameter.serve.app import create_app
from pentameter.serve.endpoints.requests import Limits
from pentameter.serve.guard import ARRIVAL_SECONDS, Access
from pentameter.serve.worker import Worker


def serve(
    worker: Worker,
    bound: socket.socket,
    limits: Limits,
    *,
    api_key: str | None,
    origins: Collection[str],
    grace_seconds: float,
) -> int:
    """Serve a worker's models at a bound socket until SIGINT or SIGTERM; running requests then have
    `grace_seconds` to end. Return the exit code: 0, or 1 if a second SIGINT cut requests off.

    api_key: what requests must carry, None for nothing. origins: see Access.
    """
    is_local = bound.getsockname()[0] in LOOPBACK
    app = create_app(worker, limits, Access(LOOPBACK if is_local else None, api_key, origins))
    bound.listen()  # whoever reads the line may connect
    url = url_of(bound)
    print(f"serving {', '.join(worker.models)} on {url}v1\na page to write with: {url}", flush=True)
    server = _Server(app, worker, grace_seconds)
    server.run(sockets=[bound])
    return 1 if server.force_exit else 0


class _Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, but closed if the head of a request (its first line and
    headers) does not arrive within twice ARRIVAL_SECONDS. uvicorn alone would keep a connection
    with an incomplete head forever."""

    _check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Call uvicorn's own method, and begin to check that the head of a request arrives in
        time."""
        super().connection_made(transport)
        self._watch(before=None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop checking the connection, and call uvicorn's own method."""
        super().connection_lost(exc)
        if self._check is not None:
            self._check.cancel()

    def _watch(self, before: object) -> None:
        """Close the connection if it is still waiting for the head of the same request as at the
        last check, when its state was `before`; otherwise check again after ARRIVAL_SECONDS."""
        waits = self.cycle is None or self.cycle.response_complete
        state = (self.cycle, waits)
        if waits and state == before:
            self.transport.close()
        else:
            self._check = self.loop.call_later(ARRIVAL_SECONDS, self._watch, state)


class _Server(uvicorn.Server):
    """uvicorn's server, but stopped differently: new requests are refused with 503, and running
    ones that do not end within `grace_seconds` get an error."""

    def __init__(self, app: FastAPI, worker: Worker, grace_seconds: float) -> None:
        # A request that still runs after it got its error is cut off.
        seconds = int(grace_seconds) + 5 if math.isfinite(grace_seconds) else None
        super().__init__(
            uvicorn.Config(
                app,
                http=_Connection,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=seconds,
            )
        )
        self._worker, self._grace_seconds = worker, grace_seconds

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Context manager in which SIGINT and SIGTERM stop the server. Unlike uvicorn's, it does
        not raise the signal again afterwards."""
        loop = asyncio.get_running_loop()
        stops = (signal.SIGINT, signal.SIGTERM)
        for number in stops:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in stops:
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """At the first signal, refuse new requests, and stop once the running ones have ended, or
        after the grace; at a second SIGINT, stop at once."""
        if not self._worker.is_stopping:
            self._worker.is_stopping = True
            why = "the server stops, and the time to end this request is up"
            loop = asyncio.get_running_loop()
            loop.call_later(self._grace_seconds, self._worker.fail_all, why)
        super().handle_exit(sig, frame)
