"""HTTP server for `watch`: read-only pages about the runs in a folder, for browsers on this
machine.

There is no login. It listens only at the given address, and answers only requests whose Host is an
IP address or this machine's name: a foreign page whose domain resolves to this machine (DNS
rebinding) sends its own name. Runs are looked up by name, so no request text ever becomes a path.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from pentameter.errors import ConfigError, PentameterError
from pentameter.machine.address import PAGE_POLICY, bind, host_name, url_of
from pentameter.report.figures.markup import render
from pentameter.report.watch.board import MOST_COMPARED, Board, in_address

HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,  # pages have the hash of their script beside it
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class WatchServer(ThreadingHTTPServer):
    """HTTP server for the runs in `folder`; `serve_forever` answers requests until `shutdown`.

    Raises ConfigError if host and port cannot be bound.
    """

    daemon_threads = True

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self.board = Board(folder)
        self.hosts = {"localhost", host.lower(), socket.gethostname().lower()}
        bound = bind(host, port)
        self.url = url_of(bound)
        super().__init__(bound.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()  # of its own
        self.socket = bound
        self.server_activate()

    def accepts(self, host: str) -> bool:
        """Return True if a request's Host header is an IP address, or a name of this machine."""
        name = host_name(host)
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.hosts
        return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error in answering a request, but nothing if the browser closed
        its connection, as it does whenever a page is left."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests; the base class refuses other methods with status 501."""

    server: WatchServer
    timeout = 30
    server_version, sys_version = "pentameter", ""

    def do_GET(self) -> None:
        """Answer a request with a page or JSON. The status is 403 for a foreign Host, 404 for an
        unknown run, and 500 for one that cannot be read."""
        if not self.server.accepts(self.headers.get("Host", "")):
            self._send(
                HTTPStatus.FORBIDDEN, "Refused: the Host of this request is not this machine."
            )
            return
        try:
            self._answer()
        except ConfigError as error:
            self._send(HTTPStatus.NOT_FOUND, str(error))
        except PentameterError as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _answer(self) -> None:
        board, asked = self.server.board, urlsplit(self.path)
        query = parse_qs(asked.query)
        if asked.path == "/":
            page = render("watch.html", scripts=("sort.js",), live="/runs.json")
            self._send(HTTPStatus.OK, page, "text/html")
        elif asked.path == "/runs.json":
            after = query.get("after", ["-1"])[0]
            if not re.fullmatch(r"-?\d{1,15}", after):
                raise ConfigError(f"after={after!r} is no version")
            news = board.news(query.get("session", [""])[0], int(after))
            # Half a surrogate pair stays as it is, for `_send` to replace.
            text = json.dumps(news, allow_nan=False, ensure_ascii=False)
            self._send(HTTPStatus.OK, text, "application/json")
        elif asked.path.startswith("/run/"):
            name = _name_in(asked.path.removeprefix("/run/"))
            self._send_live([name], asked.path, query)
        elif asked.path == "/compare":
            runs = re.search(r"(?:^|&)runs=([^&]*)", asked.query)
            names = list(dict.fromkeys(map(_name_in, runs[1].split(",")))) if runs else []
            if not 2 <= len(names) <= MOST_COMPARED:
                raise ConfigError(f"compare takes two runs to {MOST_COMPARED}: /compare?runs=A,B")
            address = "/compare?runs=" + ",".join(map(in_address, names))
            self._send_live(names, address, query)
        else:
            raise ConfigError(f"there is no page {asked.path}; the first one is /")

    def _send_live(self, names: list[str], address: str, query: dict[str, list[str]]) -> None:
        """Send the runs' page, or only its version if the query asks for that (for polling)."""
        live = f"{address}{'&' if '?' in address else '?'}version=1"
        if "version" in query:
            version = {"version": self.server.board.version(names)}
            self._send(HTTPStatus.OK, json.dumps(version), "application/json")
        else:
            self._send(HTTPStatus.OK, self.server.board.page(names, live), "text/html")

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode("utf-8", errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, as every open page polls every two seconds."""


def _name_in(address: str) -> str:
    """Return the run's name that `in_address` has percent-encoded."""
    return unquote(address, errors="surrogateescape")
