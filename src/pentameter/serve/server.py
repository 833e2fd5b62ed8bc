"""The server process: models loaded into batchers, a socket, and a stop that loses nothing."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from pentameter.checkpoint.load_model import LoadedModel
from pentameter.machine.address import LOOPBACK, url_of
from pentameter.model.gpt import GPT
from pentameter.serve.app import create_app
from pentameter.serve.passes import Slots
from pentameter.serve.requests import Limits
from pentameter.serve.worker import ServedModel, Worker


def served_model(name: str, loaded: LoadedModel, n_slots: int) -> ServedModel:
    """Make a loaded model ready to serve, and find its passes' shapes by trial. The module is taken
    over, and must compute nothing else from now on."""
    model, tokenizer = loaded.model, loaded.tokenizer
    assert isinstance(model, GPT)  # no other is loaded without its function
    slots = Slots(model, tokenizer.vocab_size, n_slots)
    slots.find_shapes()
    return ServedModel(name, tokenizer, slots)


def serve(worker: Worker, bound: socket.socket, limits: Limits, *, grace_seconds: float) -> int:
    """Serve a worker's models at a bound socket until a signal asks to stop; running requests then
    have `grace_seconds` to end. Return the exit code: 0 if every request was answered or told."""
    is_local = bound.getsockname()[0] in LOOPBACK
    app = create_app(worker, limits, LOOPBACK if is_local else None)
    bound.listen()  # whoever reads the line may connect
    print(f"serving {', '.join(worker.models)} on {url_of(bound)}v1", flush=True)
    server = _Server(app, worker, grace_seconds)
    server.run(sockets=[bound])
    return 1 if server.force_exit else 0


class _Server(uvicorn.Server):
    """uvicorn, with our stop: new requests are refused, running ones end or are told."""

    def __init__(self, app: FastAPI, worker: Worker, grace_seconds: float) -> None:
        seconds = int(grace_seconds) + 5  # what hangs after it was told is cut off
        super().__init__(
            uvicorn.Config(
                app, log_config=None, access_log=False, timeout_graceful_shutdown=seconds
            )
        )
        self._worker, self._grace_seconds = worker, grace_seconds

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM; unlike uvicorn's, the signal does not kill afterwards."""
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
        """Stop with grace at the first signal, at once at the second SIGINT."""
        if not self._worker.is_stopping:
            self._worker.is_stopping = True
            why = "the server stops, and the time to end this request is up"
            loop = asyncio.get_running_loop()
            loop.call_later(self._grace_seconds, self._worker.fail_all, why)
        super().handle_exit(sig, frame)
