"""File systems that `fsspec` opens by URL (`https://`, `s3://`, `hf://`, …): opening one, whether a
failure may pass, and errors in words without the secrets that a URL may hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from pentameter.config.urls import shown_url
from pentameter.errors import ConfigError, missing_package, printable

CONNECT_SECONDS, SILENCE_SECONDS = 30.0, 60.0
"""Maximum seconds to wait for an HTTP server to accept a connection, and to send the next bytes."""

LOG_IN = "log in as its kind of storage wants it (~/.netrc, AWS_PROFILE, HF_TOKEN, …)"

_HTTP = ("http", "https")

_PASSING = ("RequestTimeout", "OperationAborted", "ExpiredToken")
"""Error codes of object stores for failures that a retry may get over, although their HTTP status
(4xx) says otherwise."""


def has_folders(url: str) -> bool:
    """Return whether the file system of a URL has folders that can be listed: all but HTTP(S),
    where a folder is a page like any other."""
    return urlsplit(url).scheme.lower() not in _HTTP


def open_file_system(url: str, doing: str, instead: str, **options: Any) -> tuple[Any, str]:
    """Return the `fsspec` file system for a URL, made with `options`, and the path within it.

    Raises ConfigError for a missing package or an unknown scheme; its message begins with `doing`
    (`reading`) and ends with what to do `instead` of installing the package.
    """

    def missing(what: str) -> ConfigError:
        return missing_package(f"{doing} {shown_url(url)}", what, "remote", instead)

    try:
        import fsspec

        if not has_folders(url):
            import aiohttp
    except ImportError as error:
        raise missing(error.name or "fsspec") from error
    if not has_folders(url):
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS
        )
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True}  # proxies, ~/.netrc
    try:
        fs, path = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        raise missing(str(error).partition("\n")[0]) from error
    except ValueError as error:
        raise ConfigError(f"{shown_url(url)}: {reason(url, error)}") from error
    return fs, path


def _behind(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its causes (`__cause__`) one by one; for an error of botocore (S3) also
    the HTTP client's error that it holds."""
    at: BaseException | None = error
    while at is not None:
        yield at
        kept = getattr(at, "kwargs", None)  # botocore's, of its HTTP client
        inner = kept.get("error") if isinstance(kept, dict) else None
        if isinstance(inner, BaseException):
            yield inner
        at = at.__cause__


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status in an error or its causes; None without one."""
    for at in _behind(error):
        answer = getattr(at, "response", None)  # botocore's
        in_answer = answer.get("ResponseMetadata", {}) if isinstance(answer, dict) else {}
        status = getattr(at, "status", None) or in_answer.get("HTTPStatusCode")
        if isinstance(status, int) and status:
            return status
    return None


def _code_of(error: BaseException) -> str:
    """Return the error code that an object store has sent with an error, such as `SlowDown`; "" if
    there is none."""
    for at in _behind(error):
        answer = getattr(at, "response", None)
        code = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
        if isinstance(code, str) and not code.isdecimal():
            return printable(code)[:80]
    return ""


def is_passing(error: BaseException) -> bool:
    """Return whether the same request may succeed later. With an HTTP status: if it is 5xx, 408,
    425 or 429, or the store's code is in _PASSING. Without one: unless a file is missing,
    permission is refused, or the operation is not supported. `fsspec` raises FileNotFoundError for
    any failure over HTTP; with a cause it counts as passing."""
    status = status_of(error)
    if status is not None:
        return status >= 500 or status in (408, 425, 429) or _code_of(error) in _PASSING
    if isinstance(error, FileNotFoundError):
        return error.__cause__ is not None  # HTTP's, for whatever went wrong
    return not isinstance(error, PermissionError | NotImplementedError)


def reason(url: str, error: BaseException) -> str:
    """Return an error from a file system in a few words, without secrets that `url` holds."""
    at = error
    while isinstance(at, FileNotFoundError) and at.__cause__ is not None:
        at = at.__cause__
    for inner in _behind(at):
        if type(inner).__name__ == "TooManyRedirects":
            history = getattr(inner, "history", ())
            begun = f"HTTP status {history[-1].status}, " if history else ""
            return f"{begun}{len(history)} redirects in a row lead nowhere"
    if (status := status_of(at)) is not None:
        code = _code_of(at)
        return f"HTTP status {status} ({code})" if code else f"HTTP status {status}"
    if isinstance(at, TimeoutError) or "Timeout" in type(at).__name__:
        return "no answer in time"
    text = str(at).partition("\n")[0].replace(url, shown_url(url))
    text = re.sub(r"(?<=\S)\?[^\s'\")]+", "", re.sub(r"//[^/\s@]+@", "//", text))
    return printable(f"{type(at).__name__.strip('_')}: {text}" if text else type(at).__name__)[:300]
