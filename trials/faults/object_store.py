"""An object store on this machine, in as much of S3's protocol as s3fs speaks, which fails as it is
told; and a plain client for it where s3fs is not installed."""

from __future__ import annotations

import http.client
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import fsspec
from fsspec.spec import AbstractFileSystem

BUCKET = "bucket"
SILENCE_SECONDS = 2.0
"""Seconds for which a client waits for an answer in these tests."""

Fault = str | None
"""A fault of one request:

status code         that answer, and nothing is done (503: S3's SlowDown; 3xx: to the same URL)
"CODE after"        it is done, and that answer says that it failed
"drop"              the connection is closed, and nothing is done
"silent"            no answer comes, and nothing is done
"truncate"          of a body that is read, half comes; of one that is written, half is stored
"flip"              one bit of the body is another
"stale"             a listing is as at the store's begin, or as `Store.old_listing` says
"""


@dataclass(frozen=True)
class Request:
    """A request, numbered from 1. `what` is PUT, GET, HEAD, DELETE, LIST, or the parts of a large
    upload: BEGIN, PART, COMPLETE, ABORT."""

    number: int
    what: str
    key: str


class Store(ThreadingHTTPServer):
    """The objects of one bucket, key → content. `fault` is asked before each request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[Request] = []
        self.fault: Callable[[Request], Fault] = lambda request: None
        self.old_listing: list[str] = []
        self.lock = threading.Lock()
        self.closed = threading.Event()

    @property
    def url(self) -> str:
        """The store's endpoint."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that were killed."""

    def options(self) -> dict[str, Any]:
        """What s3fs needs to know to speak with this store, and to give up soon."""
        retries = {"total_max_attempts": 1}
        return {
            "key": "test",
            "secret": "test",
            "client_kwargs": {"endpoint_url": self.url, "region_name": "us-east-1"},
            "config_kwargs": {
                "retries": retries,
                "connect_timeout": 5,
                "read_timeout": SILENCE_SECONDS,
                "s3": {"addressing_style": "path"},
            },
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/")
        body = self._body()
        store = self.server
        with store.lock:
            request = Request(len(store.requests) + 1, self._what(key, query), key)
            store.requests.append(request)
            fault = store.fault(request)
        if fault == "drop":
            return self._close()
        if fault == "silent":
            store.closed.wait(5)
            return self._close()
        if fault is not None and fault.isdecimal():
            return self._fail(int(fault))
        if fault in ("truncate", "flip") and request.what in ("PUT", "PART"):
            body = body[: len(body) // 2] if fault == "truncate" else _flipped(body, 1)
        with store.lock:
            status, headers, content = self._do(request, query, body, fault)
        if fault is not None and fault.endswith(" after"):
            return self._fail(int(fault.removesuffix(" after")))
        if fault == "flip" and request.what == "GET":
            content = _flipped(content, 2)
        half = fault == "truncate" and request.what == "GET"
        return self._send(status, headers, content, half=half)

    def _what(self, key: str, query: dict[str, str]) -> str:
        if self.command == "GET" and not key:
            return "LIST"
        if self.command == "POST":
            return "BEGIN" if "uploads" in query else "COMPLETE"
        if "uploadId" in query:
            return "PART" if self.command == "PUT" else "ABORT"
        return self.command

    def _do(  # noqa: PLR0911
        self, request: Request, query: dict[str, str], body: bytes, fault: Fault
    ) -> tuple[int, dict[str, str], bytes]:
        store, key = self.server, request.key
        if request.what == "LIST":
            keys = store.old_listing if fault == "stale" else sorted(store.objects)
            return 200, {}, _listing(keys, query.get("prefix", ""), store.objects)
        if request.what == "PUT":
            store.objects[key] = body
            return 200, {"ETag": _etag(body)}, b""
        if request.what == "BEGIN":
            name = uuid.uuid4().hex
            store.uploads[name] = {}
            text = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><UploadId>{name}</UploadId>"
            return 200, {}, _xml("InitiateMultipartUploadResult", text)
        if request.what == "PART":
            store.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, {"ETag": _etag(body)}, b""
        if request.what == "COMPLETE":
            parts = store.uploads.pop(query["uploadId"])
            store.objects[key] = b"".join(parts[number] for number in sorted(parts))
            text = f"<Key>{escape(key)}</Key><ETag>{_etag(store.objects[key])}</ETag>"
            return 200, {}, _xml("CompleteMultipartUploadResult", text)
        if request.what in ("ABORT", "DELETE"):
            store.uploads.pop(query.get("uploadId", ""), None)
            store.objects.pop(key, None)
            return 204, {}, b""
        found = store.objects.get(key)
        if found is None:
            return 404, {}, _error("NoSuchKey")
        headers = {"ETag": _etag(found), "Last-Modified": "Wed, 25 Nov 2026 12:00:00 GMT"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            return 200, headers, found
        start, end = int(asked[1]), min(int(asked[2]) + 1, len(found))
        if start >= len(found):
            return 416, {}, _error("InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(found)}"
        return 206, headers, found[start:end]

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return body
        content, rest = b"", body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            n_bytes = int(size.partition(b";")[0], 16)
            if not n_bytes:
                break
            content, rest = content + rest[:n_bytes], rest[n_bytes + 2 :]
        return content

    def _fail(self, status: int) -> None:
        codes = {503: "SlowDown", 500: "InternalError", 403: "AccessDenied", 404: "NoSuchKey"}
        here = {"Location": f"{self.server.url}{self.path}"} if status // 100 == 3 else {}
        self._send(status, here, _error(codes.get(status, "Moved")))

    def _send(
        self, status: int, headers: dict[str, str], body: bytes, *, half: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if half else body)
        if half:
            self._close()

    def _close(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.close()


def _flipped(body: bytes, bit: int) -> bytes:
    """The body with another bit in its middle: reading flips another one than writing, and so never
    mends it."""
    at = len(body) // 2
    return body[:at] + bytes([body[at] ^ bit]) + body[at + 1 :] if body else body


def _etag(body: bytes) -> str:
    return f'"{md5(body).hexdigest()}"'


def _xml(name: str, text: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}>{text}</{name}>'.encode()


def _error(code: str) -> bytes:
    return _xml("Error", f"<Code>{code}</Code><Message>{code}</Message>")


def _listing(keys: list[str], prefix: str, objects: dict[str, bytes]) -> bytes:
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{len(objects.get(key, b''))}</Size>"
        "<LastModified>2026-11-25T12:00:00.000Z</LastModified></Contents>"
        for key in keys
        if key.startswith(prefix)
    )
    text = f"<Name>{BUCKET}</Name><IsTruncated>false</IsTruncated><KeyCount>1</KeyCount>{entries}"
    return _xml("ListBucketResult", text)


class PlainStore(AbstractFileSystem):
    """The requests that a run makes of an object store, one HTTP request each, without s3fs."""

    protocol = "s3"
    cachable = False

    def __init__(self, client_kwargs: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._host = urlsplit(client_kwargs["endpoint_url"]).netloc

    def _ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        connection = http.client.HTTPConnection(self._host, timeout=SILENCE_SECONDS)
        try:
            connection.request(method, f"/{quote(path, safe='/?=&')}", body, headers)
            response = connection.getresponse()
            content = response.read()
        except http.client.HTTPException as error:  # a body that ends early, for example
            raise OSError(repr(error)) from None
        finally:
            connection.close()
        if response.status == 404:
            raise FileNotFoundError(path)
        if response.status == 403:
            raise PermissionError(path)
        if response.status == 416:
            raise ValueError(path)
        if response.status >= 300:
            raise OSError(f"HTTP status {response.status}")
        return content

    def cat_file(self, path, start=None, end=None, **options):
        return self._ask("GET", path, Range=f"bytes={start}-{end - 1}")

    def pipe_file(self, path, value, mode="overwrite", **options):
        self._ask("PUT", path, value)

    def put_file(self, lpath, rpath, **options):
        with open(lpath, "rb") as file:
            self._ask("PUT", rpath, file.read())

    def rm_file(self, path):
        self._ask("DELETE", path)

    def find(self, path, **options):
        bucket, _, prefix = path.partition("/")
        text = self._ask("GET", f"{bucket}?list-type=2&prefix={prefix}/").decode()
        return [f"{bucket}/{key}" for key in re.findall(r"<Key>(.*?)</Key>", text)]


def use_client(client: str, options: dict[str, Any]) -> None:
    """Have `s3://` URLs in this process opened by `client` (`plain` or `s3fs`), with `options`."""
    from fsspec.registry import register_implementation

    if client == "plain":
        register_implementation("s3", PlainStore, clobber=True)
    else:
        import s3fs

        s3fs.S3FileSystem.retries = 1
        register_implementation("s3", s3fs.S3FileSystem, clobber=True)
    fsspec.config.conf["s3"] = options


def forget_client() -> None:
    """Have `s3://` URLs opened as if `use_client` had never been called."""
    from fsspec.registry import _registry

    _registry.pop("s3", None)
    fsspec.config.conf.pop("s3", None)


@contextmanager
def emptied(store: Store) -> Iterator[Store]:
    """A running store without objects, requests or faults, which opens s3:// within the block."""
    store.objects.clear()
    store.requests.clear()
    store.old_listing = []
    store.fault = lambda request: None
    use_client("plain", store.options())
    try:
        yield store
    finally:
        forget_client()


@contextmanager
def running_store() -> Iterator[Store]:
    """A running store, which ends with the block."""
    store = Store()
    thread = threading.Thread(target=store.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield store
    finally:
        store.closed.set()
        store.shutdown()
        thread.join()
        store.server_close()


def wait_until(reached: Callable[[], bool], seconds: float) -> None:
    """Return once `reached` returns True; AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.01)
