"""URLs in a configuration: recognised, shown without what may be secret, refused with a secret.

A configuration is written into its run folder, every checkpoint, the report and trackers.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pentameter.errors import printable

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# In keys whose words are apart (`apiKey` is api_key). Not design, keyword, author or tokenizer.
_SECRET = re.compile(
    r"token(?!iz)|secret(?!ar)|signature|(?<![a-z])sign(?![a-z])|sig(?![a-z])|passw|pwd"
    r"|credential|keys?(?![a-z])|keyid|auth(?!or(?!iz))|(?<![a-z])session|sessionid"
)
_AZURE = ("abfs", "abfss", "az", "wasb", "wasbs")
"""Schemes in whose URLs the user is a container: `abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/`."""


def is_remote(path: str | Path) -> bool:
    """Return True for a URL, `scheme://…`."""
    return isinstance(path, str) and _REMOTE.match(path) is not None


def was_url(path: Path) -> bool:
    """Return True for a path made from a URL, in which `//` has become `/`: `s3:/bucket/prefix`."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def given_path(path: str) -> str:
    """Return a path with the home folder in place of a leading `~`, which a shell replaces only
    where it sees it (`--run-dir ~/x`, but not `"~/x"`, nor in a file). Any other path or URL, and
    one that exists under that very name, is returned unchanged."""
    if not path.startswith("~") or os.path.lexists(path):
        return path
    return os.path.expanduser(path)


def shown_url(url: str) -> str:
    """Return a URL without user, password, query and fragment, printable, for messages."""
    try:
        parts = urlsplit(url)
    except ValueError:  # half an IPv6 address
        return printable(url.partition("?")[0].rpartition("@")[2])
    host = parts.netloc if _is_container(parts) else parts.netloc.rpartition("@")[2]
    return printable(f"{parts.scheme}://{host}{parts.path}")


def url_within(url: str, path: str) -> str | None:
    """Return the URL of an object in Azure's storage, from `url`, the URL of another object in the
    same container, and `path`, which is CONTAINER/PATH as its file system lists it. None if `url`
    is not one of Azure's."""
    parts = urlsplit(url)
    if not _is_container(parts):
        return None
    return f"{parts.scheme}://{parts.netloc}/{path.lstrip('/').partition('/')[2]}"


def _is_container(parts: SplitResult) -> bool:
    """Return whether the part before `@` in a URL is the name of an Azure container, which may be
    shown, rather than a user's name and password."""
    user, _, _ = parts.netloc.rpartition("@")
    return parts.scheme.lower() in _AZURE and re.fullmatch(r"[\w$-]+", user) is not None


def shown_path(path: str) -> str:
    """Return a path for messages: a URL without secrets (`shown_url`), any other path as it is."""
    return shown_url(path) if is_remote(path) else path


def last_part(path: str) -> str:
    """Return the last part of a path, or of a URL's path, decoded; the host if a URL has none. What
    only looks like a URL is taken for a path."""
    if not is_remote(path):
        return PurePosixPath(path).name
    try:
        parts = urlsplit(path)
    except ValueError:  # half an IPv6 address: `url_problem` says so
        return PurePosixPath(path).name
    return PurePosixPath(unquote(parts.path)).name or parts.netloc.rpartition("@")[2]


def url_problem(path: str | None, instead: str = "download the file and name that") -> str | None:
    """Return a sentence that refuses a URL in a configuration because it holds a secret: a user, a
    password, or a query key that looks like one. None for any other URL, any other path, and None.
    The sentence does not repeat the secret; it ends with `instead`, what else to do than log in."""
    if path is None or not is_remote(path):
        return None
    try:
        parts = urlsplit(path)
        keys = [key for key, _ in parse_qsl(parts.query, keep_blank_values=True)]
    except ValueError as error:
        return f"{shown_url(path)} is no URL ({error}); check it"
    apart = {key: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower() for key in keys}
    secret = next((key for key in keys if _SECRET.search(apart[key])), None)
    if "@" in parts.netloc and not _is_container(parts):
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
