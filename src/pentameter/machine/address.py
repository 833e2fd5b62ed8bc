"""The address at which a server listens, as `--host` and `--port` name it."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

from pentameter.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of a page that is one file and may speak to its own server alone."""
NEXT_PORTS = 20
"""Ports above one in use of which a free one is named."""


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket bound to `host` and `port` that does not listen yet; port 0 takes a free
    one. Raises ConfigError, with a remedy, if the address is in use, forbidden or not this
    machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        return bound
    except OverflowError:
        refusal = f"--port {port} must be from 0 to 65535; 0 takes a free one"
    except OSError as error:
        refusal = _refusal(family, host, port, error)
    bound.close()
    raise ConfigError(refusal)


def _refusal(family: int, host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        free = _free_port(family, host, port)
        other = f"--port {free} is free" if free else "--port 0 takes a free one"
        return f"--port {port} is in use on {host}; {other}"
    if error.errno == errno.EACCES:
        return f"--port {port} is not allowed to this user; take one above 1023, such as 8001"
    return f"--host {host}: cannot listen there: {error.strerror or error}; try --host 127.0.0.1"


def _free_port(family: int, host: str, port: int) -> int | None:
    for other in range(port + 1, min(port + 1 + NEXT_PORTS, 65536)):
        with socket.socket(family) as tried:
            try:
                tried.bind((host, other))
            except OSError:
                continue
            return other
    return None


def url_of(bound: socket.socket) -> str:
    """Return the URL at which the socket's server has its first page: `http://127.0.0.1:8000/`."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def host_name(header: str) -> str:
    """Return the name or IP address in a Host header, in small letters; "" if it has none."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:  # half an IPv6 address
        return ""
