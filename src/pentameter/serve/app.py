"""The HTTP application: routes with OpenAI's interface, event streams, a guard against other sites'
pages, and a server that answers running requests before it stops.

Nothing from a prompt or an answer is ever logged.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pentameter.errors import did_you_mean, printable
from pentameter.machine.address import LOOPBACK, PAGE_POLICY, host_name, url_of
from pentameter.serve.continuation import Piece
from pentameter.serve.requests import (
    ChatRequest,
    CompletionRequest,
    Limits,
    RequestError,
    body_of,
    parsed,
)
from pentameter.serve.worker import Job, ServedModel, ServerBusyError, TakesTooLongError, Worker

RETRY_SECONDS = 2
_JSON = ("application/json",)
_PAGE = Path(__file__).with_name("templates") / "page.html"
_PAGE_HEADERS = {"Content-Security-Policy": PAGE_POLICY, "Referrer-Policy": "no-referrer"}
ARRIVAL_SECONDS = 30.0
"""Longest time in seconds in which a request's body may arrive; its head has up to twice as
long."""


def create_app(worker: Worker, limits: Limits, hosts: Collection[str] | None) -> FastAPI:
    """Return the FastAPI application that serves a worker's models; when it stops, it closes the
    worker.

    limits: the most that one request may ask for.
    hosts: names (without port) that the Host header may have, None for any.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.use_running_loop()
        try:
            yield
        finally:
            await asyncio.to_thread(worker.close)

    # FastAPI's pages of documentation load scripts from elsewhere.
    app = FastAPI(title="pentameter", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, hosts=hosts, body_bytes=limits.body_bytes)
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _failed)

    @app.get("/")
    async def page() -> Response:
        """Return the HTML page with which a browser can try the model; its script sends requests to
        the routes below."""
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers=_PAGE_HEADERS)

    @app.get("/health")
    async def report_status() -> Response:
        """Return the server's status and texts in progress; 200 while requests are taken,
        else 503."""
        status = "stopping" if worker.is_stopping else "ok" if worker.is_alive else "failed"
        n_texts = {name: each.n_texts for name, each in worker.models.items()}
        body = {"status": status, "models": list(worker.models), "texts": n_texts}
        return JSONResponse(body, status_code=200 if status == "ok" else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        """List the served models."""
        data = [_described(served) for served in worker.models.values()]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Describe the model `name`; 404 if it is not served."""
        return JSONResponse(_described(_chosen(worker, name)))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Handle POST /v1/completions: continue one or more prompts. The request's body is a
        CompletionRequest."""
        return await _answer(worker, limits, CompletionRequest, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Handle POST /v1/chat/completions: answer the last message in a conversation. The
        request's body is a ChatRequest."""
        return await _answer(worker, limits, ChatRequest, request)

    return app


def _described(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "pentameter",
        "context_length": served.context_length,
        "has_chat_template": served.tokenizer.chat is not None,
    }


def _chosen(worker: Worker, name: str | None) -> ServedModel:
    """Return the served model with the name that a request gives. A request without a name (None)
    gets the only model, if just one is served. Raises RequestError (404), which lists the served
    names, for an unknown name, and for None if several are served."""
    if name is None and len(worker.models) == 1:
        return next(iter(worker.models.values()))
    if name is None or name not in worker.models:
        hint = did_you_mean(name or "", worker.models) or "."
        raise RequestError(
            f"there is no model {printable(name or '')[:80]!r} here{hint} Served: "
            + ", ".join(worker.models),
            404,
            param="model",
            code="model_not_found",
        )
    return worker.models[name]


async def _answer(
    worker: Worker, limits: Limits, kind: type[CompletionRequest] | type[ChatRequest], http: Request
) -> Response:
    """Parse a request (its body is a `kind`), queue its texts and return the answer: an event
    stream if the request asks for one, else a JSON object once all texts are complete. If the
    client disconnects, no more tokens are generated. Raises RequestError."""
    try:
        asked = parsed(kind, body_of(await http.body()))
    except ClientDisconnect:
        return Response(status_code=499)  # which nobody reads
    served = _chosen(worker, asked.model)
    # Tokenizing a long prompt, and rendering, must not hold up the streams.
    texts = await asyncio.to_thread(asked.texts, served, limits)
    try:
        job = worker.submit(served, texts)
    except ServerBusyError as error:
        raise RequestError(str(error), 503, code="server_busy") from error
    form = _Form(job, isinstance(asked, ChatRequest))
    if asked.stream:
        events = _events(worker, job, form, limits.seconds, with_usage=asked.asks_for_usage)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    whole = asyncio.ensure_future(_whole(job, limits.seconds))
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            return Response(status_code=499)  # which nobody reads
        return JSONResponse(form.whole(whole.result()))
    except Exception as error:
        raise _described_error(error, limits) from error
    finally:
        for task in (whole, gone):
            task.cancel()
        worker.cancel(job)


async def _whole(job: Job, seconds: float) -> dict[int, Piece]:
    """Wait until all texts of the request `job` are complete; return choice index → its whole text.
    Raises TakesTooLongError after `seconds`."""
    found: dict[int, Piece] = {}
    async for pieces in job.pieces(seconds):
        for index, piece in pieces:
            found[index] = found[index].joined(piece) if index in found else piece
    return found


async def _disconnected(http: Request) -> None:
    """Return once the client has disconnected."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _events(
    worker: Worker, job: Job, form: _Form, seconds: float, *, with_usage: bool
) -> AsyncIterator[str]:
    """Yield a streamed answer as server-sent events, with token counts at the end if `with_usage`.
    After `seconds`, or if generation fails, the last event is the error. When the stream is closed,
    no more tokens are generated."""
    n_tokens: Counter[int] = Counter()
    try:
        for index in form.openings():
            yield _event(form.chunk(index, Piece(), is_first=True))
        async with aclosing(job.pieces(seconds)) as news:
            async for pieces in news:
                for index, piece in pieces:
                    n_tokens[index] = piece.n_tokens
                    if piece.text or piece.chances or piece.finish_reason:
                        yield _event(form.chunk(index, piece))
        if with_usage:
            yield _event(form.shell([]) | {"usage": form.usage(n_tokens.values())})
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield _event(_described_error(error, None).to_json())
    finally:
        worker.cancel(job)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _described_error(error: Exception, limits: Limits | None) -> RequestError:
    """Return the RequestError that tells the client about an exception during generation. The
    message names the time limit of `limits`, if given."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, TakesTooLongError):
        most = f" of {limits.seconds:g} s" if limits else ""
        message = f"the request's time{most} is up; ask for fewer tokens, or stream them"
        return RequestError(message, 408, code="timeout")
    if isinstance(error, ServerBusyError):
        return RequestError(str(error), 503, code="server_stopping")
    return RequestError(f"{type(error).__name__}: {error}", 500, code="failed")


@dataclass
class _Form:
    """Builds the JSON of OpenAI's interface for the answer to one request, streamed or whole: a
    chat completion if `is_chat`, else a completion."""

    job: Job
    is_chat: bool

    def __post_init__(self) -> None:
        prefix = "chatcmpl-" if self.is_chat else "cmpl-"
        self._id, self._created = prefix + uuid.uuid4().hex, int(time.time())

    def shell(self, choices: list[dict[str, Any]], *, is_chunk: bool = True) -> dict[str, Any]:
        """Return the JSON object that carries `choices`: one streamed event if `is_chunk`, else the
        whole answer."""
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.job.served.name,
            "system_fingerprint": _fingerprint(),
            "choices": choices,
        }

    def usage(self, n_tokens: Iterable[int]) -> dict[str, int]:
        """Return the token counts of prompt, completion and both. A prompt with several answers
        counts once. n_tokens: number of generated tokens for each text."""
        prompts = sum(len(t.asked.prompt) for t in self.job.texts if t.asked.sample == 0)
        drawn = sum(n_tokens)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": drawn,
            "total_tokens": prompts + drawn,
        }

    def openings(self) -> Sequence[int]:
        """Return the indices of the choices whose stream begins with an event that only gives the
        role `assistant`: all choices of a chat, none of a completion."""
        return range(len(self.job.texts)) if self.is_chat else ()

    def chunk(self, index: int, piece: Piece, *, is_first: bool = False) -> dict[str, Any]:
        """Return one streamed event for the choice `index`, with the new text in `piece`;
        `is_first` adds the role `assistant`."""
        choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish_reason}
        if self.is_chat:
            choice["delta"] = {"role": "assistant", "content": ""} if is_first else {}
            if piece.text:
                choice["delta"]["content"] = piece.text
        else:
            choice["text"] = piece.text
        return self.shell([choice | {"logprobs": self._logprobs(index, piece)}])

    def whole(self, pieces: dict[int, Piece]) -> dict[str, Any]:
        """Return the whole answer. `pieces` maps each choice's index to its complete text."""
        choices = []
        for index, piece in sorted(pieces.items()):
            message = {"role": "assistant", "content": piece.text}
            said = {"message": message} if self.is_chat else {"text": piece.text}
            choice = {"index": index, **said, "finish_reason": piece.finish_reason}
            choices.append(choice | {"logprobs": self._logprobs(index, piece)})
        usage = self.usage(piece.n_tokens for piece in pieces.values())
        return self.shell(choices, is_chunk=False) | {"usage": usage}

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any] | None:
        if self.job.texts[index].asked.n_rivals is None:
            return None
        if self.is_chat:
            content = [
                _token(each.text, each.logprob)
                | {"top_logprobs": [_token(*rival) for rival in each.rivals]}
                for each in piece.chances
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [each.text for each in piece.chances],
            "token_logprobs": [each.logprob for each in piece.chances],
            # If several tokens have one text, the likeliest counts.
            "top_logprobs": [dict(reversed(each.rivals)) for each in piece.chances],
            "text_offset": [each.offset for each in piece.chances],
        }


def _token(text: str, logprob: float) -> dict[str, Any]:
    whole = "\N{REPLACEMENT CHARACTER}" not in text  # else it is a part of a character
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


@cache
def _fingerprint() -> str:  # looked up on disk
    return f"pentameter-{metadata.version('pentameter')}-torch-{metadata.version('torch')}"


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {"Retry-After": str(RETRY_SECONDS)} if error.status == 503 else None
    return JSONResponse(error.to_json(), status_code=error.status, headers=headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{request.method} {printable(request.url.path)[:80]}: {error.detail}"
    refused = RequestError(
        f"{said}; there are /, /v1/completions, /v1/chat/completions, /v1/models and /health",
        error.status_code,
    )
    return JSONResponse(refused.to_json(), status_code=error.status_code, headers=error.headers)


async def _failed(_: Request, error: Exception) -> Response:
    failed = RequestError(f"the server failed: {type(error).__name__}", 500, code="failed")
    return JSONResponse(failed.to_json(), status_code=500)


class Guard:
    """ASGI middleware that refuses requests from other sites' pages, bodies that are not JSON, and
    bodies above `body_bytes`.

    A page in a browser can send requests to any address, including this machine's own. So three
    headers are checked. Host must be in `hosts` (None: any), because a foreign name may resolve to
    127.0.0.1. Origin, if given, must be this server. Content-Type must be JSON, which an HTML form
    cannot send.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, body_bytes: int) -> None:
        self._app, self._hosts, self._most = app, hosts, body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an ASGI request on, or answer it with 403 (another Host or Origin), 413 (too large a
        body) or 415 (not JSON)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        refused = self._refusal(scope["method"], headers)
        if refused is not None:
            response = await _refused(Request(scope), refused)
            await response(scope, receive, send)
            return
        await self._app(scope, _Body(receive, self._most), send)

    def _refusal(self, method: str, headers: dict[str, str]) -> RequestError | None:
        host = headers.get("host", "")
        if self._hosts is not None and host_name(host) not in self._hosts:
            return RequestError(
                f"the Host {printable(host)[:80]!r} is not this server's; it answers to "
                + ", ".join(sorted(self._hosts)),
                403,
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return RequestError("pages of other sites may not ask this server", 403)
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and media_type not in _JSON:
            return RequestError("the body must be JSON, with Content-Type: application/json", 415)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._most:
            return _too_large(self._most)
        return None


class _Body:
    """An ASGI `receive` callable around another that limits the request's body. It raises
    RequestError if the body has more than `most` bytes (413), if it has not arrived after
    ARRIVAL_SECONDS (408), or if the server stops before it has arrived (503)."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most = receive, most
        self._n_bytes, self._is_whole = 0, False
        self._deadline = asyncio.get_running_loop().time() + ARRIVAL_SECONDS

    async def __call__(self) -> Message:
        """Return the next ASGI message: of the body, or of the connection once the body has
        arrived."""
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as error:
            said = f"the body did not arrive within {ARRIVAL_SECONDS:g} s"
            raise RequestError(said, 408, code="timeout") from error
        except asyncio.CancelledError as error:  # by uvicorn, which would log it as a failure
            said = "the server stops, and the body has not arrived"
            raise RequestError(said, 503, code="server_stopping") from error
        self._is_whole = not message.get("more_body", False)
        self._n_bytes += len(message.get("body", b""))
        if self._n_bytes > self._most:
            raise _too_large(self._most)
        return message


def _too_large(most: int) -> RequestError:
    return RequestError(f"the body has more than {most:,} bytes, which is the most it may", 413)


def serve(worker: Worker, bound: socket.socket, limits: Limits, *, grace_seconds: float) -> int:
    """Serve a worker's models at a bound socket until SIGINT or SIGTERM; running requests then have
    `grace_seconds` to end. Return the exit code: 0, or 1 if a second SIGINT cut requests off."""
    is_local = bound.getsockname()[0] in LOOPBACK
    app = create_app(worker, limits, LOOPBACK if is_local else None)
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
