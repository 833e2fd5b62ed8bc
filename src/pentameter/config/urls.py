"""URLs in a configuration: recognised, shown without what may be secret, refused with a secret.

A configuration is written into its run folder, every checkpoint, the report and trackers.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qsl, unquote, urlsplit

from pentameter.errors import printable

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SECRET = re.compile(r"token|secret|sig|passw|pwd|credential|key|auth|session", re.IGNORECASE)


def is_remote(path: str | Path) -> bool:
    """Return True for a URL, `scheme://…`."""
    return isinstance(path, str) and _REMOTE.match(path) is not None


def was_url(path: Path) -> bool:
    """Return True for a path made from a URL, in which `//` has become `/`: `s3:/bucket/prefix`."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def shown_url(url: str) -> str:
    """Return a URL without user, password, query and fragment, printable, for messages."""
    try:
        parts = urlsplit(url)
    except ValueError:  # half an IPv6 address
        return printable(url.partition("?")[0].rpartition("@")[2])
    return printable(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")


def shown_path(path: str) -> str:
    """Return a path for messages: a URL without secrets (`shown_url`), any other path as it is."""
    return shown_url(path) if is_remote(path) else path


def last_part(path: str) -> str:
    """Return the last part of a path, or of a URL's path, decoded; the host if a URL has none."""
    if not is_remote(path):
        return PurePosixPath(path).name
    parts = urlsplit(path)
    return PurePosixPath(unquote(parts.path)).name or parts.netloc.rpartition("@")[2]


def url_problem(path: str | None, instead: str = "download the file and name that") -> str | None:
    """Return the reason that a URL may not stand in a configuration: it has a user, a password, or
    a query key that looks like a secret. The secret is not repeated; the remedy ends with what to
    do `instead` of logging in. Return None for all others."""
    if path is None or not is_remote(path):
        return None
    try:
        parts = urlsplit(path)
        keys = [key for key, _ in parse_qsl(parts.query, keep_blank_values=True)]
    except ValueError as error:
        return f"{shown_url(path)} is no URL ({error}); check it"
    secret = next((key for key in keys if _SECRET.search(key)), None)
    if "@" in parts.netloc:
        secret = "a user or password"
    elif secret is not None:
        secret = f"{printable(secret)[:40]}=…"
    if secret is None:
        return None
    return (
        f"{shown_url(path)} is given with {secret}, and a configuration is written into run "
        "folders, checkpoints and reports; log in as its kind of storage wants it (~/.netrc, "
        f"AWS_PROFILE, HF_TOKEN, …), or {instead}"
    )
