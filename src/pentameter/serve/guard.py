"""A guard before the application: who may ask, and how large and how slow a body may be."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Collection
from dataclasses import dataclass, field

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pentameter.errors import printable
from pentameter.machine.address import host_name
from pentameter.serve.endpoints.parsing import RequestError

RETRY_SECONDS = 2
_JSON = ("application/json",)
_OPEN = ("/", "/health")  # they show nothing of the models, and say nothing that is written
ARRIVAL_SECONDS = 30.0
"""Longest time in seconds in which a request's body may arrive; its head has up to twice as
long."""


async def refused(_: Request, error: Exception) -> Response:
    """Return the response for a RequestError: its JSON, and when to ask again if the server is
    busy."""
    assert isinstance(error, RequestError)
    by_status = {503: {"Retry-After": str(RETRY_SECONDS)}, 401: {"WWW-Authenticate": "Bearer"}}
    headers = by_status.get(error.status)
    return JSONResponse(error.to_json(), status_code=error.status, headers=headers)


@dataclass(frozen=True)
class Access:
    """Who may ask the server."""

    hosts: Collection[str] | None
    """Names (without port) that the Host header may have, None for any."""
    api_key: str | None = field(default=None, repr=False)
    """The bearer token that requests must carry; None if they need none."""
    origins: Collection[str] = ()
    """Origins of other sites whose pages may ask; `*` is any."""


class Guard:
    """ASGI middleware that refuses requests from other sites' pages, requests without the key,
    bodies that are not JSON, and bodies above `body_bytes`.

    A page in a browser can send requests to any address, including this machine's own. So three
    headers are checked. Host must be one of `access`, because a foreign name may resolve to
    127.0.0.1. Origin, if given, must be this server, or one of `access`. Content-Type must be JSON,
    which an HTML form cannot send.
    """

    def __init__(self, app: ASGIApp, access: Access, body_bytes: int) -> None:
        self._app, self._access, self._most = app, access, body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an ASGI request on, or answer it with 401 (no key), 403 (another Host or Origin),
        413 (too large a body) or 415 (not JSON)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        refusal = self._refusal(scope["method"], scope["path"], headers)
        if refusal is not None:
            response = await refused(Request(scope), refusal)
            await response(scope, receive, send)
            return
        await self._app(scope, _Body(receive, self._most), send)

    def _refusal(self, method: str, path: str, headers: dict[str, str]) -> RequestError | None:
        host, access = headers.get("host", ""), self._access
        if access.hosts is not None and host_name(host) not in access.hosts:
            return RequestError(
                f"the Host {printable(host)[:80]!r} is not this server's; it answers to "
                + ", ".join(sorted(access.hosts)),
                403,
            )
        origin = headers.get("origin")
        is_own = origin is None or origin.partition("://")[2] == host
        if not is_own and not {origin, "*"} & {*access.origins}:
            return RequestError(
                "pages of other sites may not ask this server; --cors-origin names those that may",
                403,
            )
        if path not in _OPEN and not _has_key(access.api_key, headers):
            return RequestError(
                "this server wants its API key: Authorization: Bearer KEY",
                401,
                code="invalid_api_key",
            )
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and media_type not in _JSON:
            return RequestError("the body must be JSON, with Content-Type: application/json", 415)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._most:
            return _too_large(self._most)
        return None


def _has_key(key: str | None, headers: dict[str, str]) -> bool:
    """Return True if no key is asked for, or the Authorization header has it. The time that this
    takes says nothing about the key."""
    if key is None:
        return True
    kind, _, given = headers.get("authorization", "").partition(" ")
    return hmac.compare_digest(given.strip().encode(), key.encode()) and kind.lower() == "bearer"


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
