"""An HTTP server on this machine that fails as it is told: for tests of remote files."""

import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FailingServer(ThreadingHTTPServer):
    """Serves `files` (path → bytes); `failures` are taken from the front, one for each GET."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.failures: list[str] = []
        self.head_failures: list[str] = []
        self.requests: list[tuple[str, str, str | None]] = []
        """(method, path with query, Range header)"""
        self.has_ranges = self.has_length = self.has_etag = True
        self.etag = ""
        """The ETag of every file; "" for one of its content."""
        self.types: dict[str, str] = {}
        """path → Content-Type"""
        self.redirects: dict[str, str] = {}
        """path → where it leads, "" for a redirect that does not say"""
        self.closed = threading.Event()

    def url(self, path):
        return f"http://127.0.0.1:{self.server_port}{path}"

    def gets(self):
        return [given for method, _, given in self.requests if method == "GET"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self._answer(self.server.head_failures)

    def do_GET(self):
        self._answer(self.server.failures)

    def _answer(self, failures):
        server = self.server
        wanted = self.headers.get("Range")
        server.requests.append((self.command, self.path, wanted))
        failure = failures.pop(0) if failures else ""
        if failure.isdecimal():
            is_bare = failure in ("204", "205", "304")
            return self._send(int(failure), {}, b"" if is_bare else b"an error page")
        if failure == "delay":
            server.closed.wait(5)
            return self._close()
        if failure == "drop":
            return self._close()
        if (target := server.redirects.get(self.path)) is not None:
            return self._send(302, {"Location": target} if target else {}, b"")
        body = server.files.get(self.path.partition("?")[0])
        if body is None:
            return self._send(404, {}, b"nothing here")
        etag = server.etag or f'"{hash(body) & 0xFFFFFFFF:x}"'
        status, headers, start = 200, {}, 0
        if kind := server.types.get(self.path):
            headers["Content-Type"] = kind
        if server.has_etag:
            headers["ETag"] = etag
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
        if asked and server.has_ranges and self.headers.get("If-Range", etag) == etag:
            start = int(asked[1])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        if not server.has_ranges:
            headers["Accept-Ranges"] = "none"
        self._send(status, headers, body[start:], failure)

    def _send(self, status, headers, body, failure=""):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.server.has_length:
            self.send_header("Content-Length", str(len(body)))
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        if failure.startswith("cut"):  # cut, or cut:BYTES
            self.wfile.write(body[: int(failure.partition(":")[2] or len(body) // 2)])
            return self._close()
        if failure == "stall":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.server.closed.wait(5)
            return self._close()
        if failure.startswith("slow"):
            for at in range(0, len(body), max(len(body) // 4, 1)):
                self.wfile.write(body[at : at + max(len(body) // 4, 1)])
                self.wfile.flush()
                time.sleep(0.05)
            return None
        self.wfile.write(body)
        if not self.server.has_length:
            return self._close()
        return None

    def _close(self):
        self.close_connection = True
        self.wfile.flush()
        self.connection.close()


@contextmanager
def failing_server():
    server = FailingServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.closed.set()
        server.shutdown()
        thread.join()
        server.server_close()
