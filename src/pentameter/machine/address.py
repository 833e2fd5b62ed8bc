"""Addresses of this machine: the one at which other nodes reach it, and those of its servers, which
`--host` and `--port` choose; who may ask there, by `--api-key` and `--cors-origin`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from urllib.parse import urlsplit

from pentameter.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy for a page that is a single file: it may connect to its own server
only."""
API_KEY = "PENTAMETER_API_KEY"
"""Environment variable that stands for `--api-key`."""
NEXT_PORTS = 20
"""Number of ports above one that is in use that are tried, to suggest a free one."""

_SIOCGIFADDR = 0x8915  # netdevice(7)


def own_address(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return (IPv4 address, network interface) at which other nodes reach this machine. The
    interface is the one that GLOO_SOCKET_IFNAME names, else NCCL_SOCKET_IFNAME if it is a plain
    name, else the one with the address of this host's name, else the first. Raises ConfigError if
    there is none but the loopback."""
    addresses = _interfaces()
    if name := environ.get("GLOO_SOCKET_IFNAME"):
        if name not in addresses:
            known = ", ".join(addresses) or "none"
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME={name} is no network interface here; known: {known}"
            )
        return addresses[name], name
    # NCCL takes patterns, too: ^docker,lo is any but these, eth the first that begins so.
    name = environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if name in addresses:
        return addresses[name], name
    others = {address: name for name, address in addresses.items() if name != "lo"}
    with contextlib.suppress(OSError):
        if (named := socket.gethostbyname(socket.gethostname())) in others:
            return named, others[named]
    for address, name in others.items():
        return address, name
    raise ConfigError("--nodes needs a network interface beside the loopback, and there is none")


def _interfaces() -> dict[str, str]:
    """Return network interface → its IPv4 address, for those that have one (Linux)."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                packed = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, packed)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


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


def api_key_of(given: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the key that requests must carry: the one `given`, else PENTAMETER_API_KEY; None
    without either. Raises ConfigError for one that no header can carry, without repeating it."""
    key = environ.get(API_KEY) or None if given is None else given
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        source = f"the key in {API_KEY}" if given is None else "--api-key"
        raise ConfigError(
            f"{source} is empty, or has a character that a header cannot carry; give ASCII "
            "letters, digits and signs, such as `openssl rand -hex 16` makes"
        )
    return key


def check_origin(origin: str) -> None:
    """Raise ConfigError unless this is an origin as a browser sends it, or `*`."""
    try:
        parts = urlsplit(origin)
        rule = f"{parts.scheme}://{parts.netloc}".lower()
    except ValueError:  # half an IPv6 address
        rule = ""
    if origin != "*" and (origin != rule or not parts.scheme or not parts.netloc):
        near = f"; did you mean {rule}?" if rule and parts.scheme and parts.netloc else ""
        raise ConfigError(
            f"--cors-origin {origin} is no origin: scheme, name and port in small letters, without "
            f"a path, such as https://chat.example or http://localhost:3000; or *{near}"
        )
