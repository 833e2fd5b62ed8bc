"""The HTTP application: routes with OpenAI's interface, and event streams.

Nothing from a prompt or an answer is ever logged.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from pentameter.errors import ConfigError, did_you_mean, printable
from pentameter.machine.address import PAGE_POLICY
from pentameter.serve.continuation import Piece, TextRequest
from pentameter.serve.endpoints.answers import Answer
from pentameter.serve.endpoints.chat import ChatRequest
from pentameter.serve.endpoints.completions import CompletionRequest
from pentameter.serve.endpoints.parsing import RequestError, body_of, parsed
from pentameter.serve.endpoints.requests import Limits, TextsRequest
from pentameter.serve.endpoints.responses import ResponsesRequest
from pentameter.serve.endpoints.tools import TOOLS_NOT_SHOWN
from pentameter.serve.guard import Access, Guard, refused
from pentameter.serve.worker import Job, ServedModel, ServerBusyError, TakesTooLongError, Worker

ENDPOINTS: dict[str, type[TextsRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
}
"""Path → what the body of a POST there is."""
CLAMPED = "X-Max-Tokens-Clamped"
_PAGE = Path(__file__).with_name("templates") / "page.html"
_PAGE_HEADERS = {"Content-Security-Policy": PAGE_POLICY, "Referrer-Policy": "no-referrer"}


def create_app(worker: Worker, limits: Limits, access: Access) -> FastAPI:
    """Return the FastAPI application that serves a worker's models; when it stops, it closes the
    worker.

    limits: the most that one request may ask for.
    access: who may ask.
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
    app.add_middleware(Guard, access=access, body_bytes=limits.body_bytes)
    if access.origins:  # outside the guard, as browsers ask first, and without the key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[CLAMPED, TOOLS_NOT_SHOWN, "Retry-After"],
        )
    app.add_exception_handler(RequestError, refused)
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

    for path, kind in ENDPOINTS.items():
        app.add_api_route(path, _route(worker, limits, kind), methods=["POST"])
    return app


def _route(
    worker: Worker, limits: Limits, kind: type[TextsRequest]
) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        return await _answer(worker, limits, kind, request)

    return route


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
    worker: Worker, limits: Limits, kind: type[TextsRequest], http: Request
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
    answer = asked.answer(job)
    headers = _clamped(asked.most_tokens, texts) | asked.headers(served)
    if asked.stream:
        events = _events(worker, answer, limits.seconds, with_usage=asked.asks_for_usage)
        headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    whole = asyncio.ensure_future(_whole(job, limits.seconds))
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            return Response(status_code=499)  # which nobody reads
        return JSONResponse(answer.whole(whole.result()), headers=headers)
    except Exception as error:
        raise _described_error(error, limits) from error
    finally:
        for task in (whole, gone):
            task.cancel()
        worker.cancel(job)


def _clamped(asked: int | None, texts: Sequence[TextRequest]) -> dict[str, str]:
    """Return the header that says how long the `texts` may become, if fewer tokens than were asked:
    to the server's most, or what the context has room for."""
    most = max(each.max_tokens for each in texts)
    return {} if asked is None or asked <= most else {CLAMPED: f"{asked} to {most}"}


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
    worker: Worker, answer: Answer, seconds: float, *, with_usage: bool
) -> AsyncIterator[str]:
    """Yield a streamed answer as server-sent events, with token counts at the end if `with_usage`.
    After `seconds`, or if generation fails, the last event is the error. When the stream is closed,
    no more tokens are generated."""
    n_tokens: Counter[int] = Counter()
    try:
        for event in answer.openings():
            yield _event(event)
        async with aclosing(answer.job.pieces(seconds)) as news:
            async for pieces in news:
                for index, piece in pieces:
                    n_tokens[index] = piece.n_tokens
                    for event in answer.chunks(index, piece):
                        yield _event(event)
        for event in answer.closings(n_tokens.values(), with_usage=with_usage):
            yield _event(event)
        if answer.ends_with_done:
            yield "data: [DONE]\n\n"
    except Exception as error:
        yield _event(answer.failed(_described_error(error, None)))
    finally:
        worker.cancel(answer.job)


def _event(content: dict[str, Any]) -> str:
    name = f"event: {content['type']}\n" if "type" in content else ""
    return f"{name}data: {json.dumps(content, ensure_ascii=False)}\n\n"


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
    if isinstance(error, ConfigError):  # of a text that cannot have the form that was asked for
        return RequestError(str(error), param="response_format", code="impossible_form")
    return RequestError(f"{type(error).__name__}: {error}", 500, code="failed")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{request.method} {printable(request.url.path)[:80]}: {error.detail}"
    paths = ", ".join(("/", *ENDPOINTS, "/v1/models"))
    unknown = RequestError(f"{said}; there are {paths} and /health", error.status_code)
    return JSONResponse(unknown.to_json(), status_code=error.status_code, headers=error.headers)


async def _failed(_: Request, error: Exception) -> Response:
    failed = RequestError(f"the server failed: {type(error).__name__}", 500, code="failed")
    return JSONResponse(failed.to_json(), status_code=500)
