"""An HTTP server on this machine that speaks the Hub's API of models, and fails as it is told."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_ourOwnSecret"
LARGE = (".safetensors", ".png")
"""Files that the Hub keeps in its large-file storage, behind a redirect."""


class Repository:
    """A model repository: its files, and a commit whose id changes with them."""

    def __init__(self, *, private=False, gated=False):
        self.private, self.gated = private, gated
        self.files: dict[str, bytes] = {}
        self.n_commits = 0

    @property
    def sha(self):
        return hashlib.sha1(repr((sorted(self.files.items()), self.n_commits)).encode()).hexdigest()

    def listed(self, name):
        data = self.files[name]
        entry = {"size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if name.endswith(LARGE):
            oid = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": oid, "sha256": oid, "size": len(data), "pointerSize": 130}
        return entry


class LocalHub(ThreadingHTTPServer):
    """Serves `repositories` by name; `failures` are taken from the front, one for each request of
    a file's content, `push_failures` likewise for the requests of a push."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}
        self.failures: list[str] = []
        self.push_failures: dict[str, int] = {}
        """Part of a path → HTTP status."""
        self.status: int | None = None
        """The status that every request is answered with."""
        self.requests: list[str] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.storage = f"http://localhost:{self.server_port}"  # another host, as the Hub's is

    def asked_for(self):
        """The files that were asked for, by the request that comes before their content."""
        found = (re.fullmatch(r"HEAD /\S+/resolve/\w+/(\S+)", each) for each in self.requests)
        return {match[1] for match in found if match}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def do_POST(self):
        self._answer()

    def do_PUT(self):
        self._answer()

    def _answer(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        body = self._body()
        if hub.status is not None:
            return self._json({"error": "the server is unwell"}, hub.status)
        for part, status in hub.push_failures.items():
            if part in path:
                return self._json({"error": "no"}, status)
        for pattern, answer in ROUTES.items():
            if found := re.fullmatch(pattern, path):
                return answer(self, *found.groups(), body)
        return self._json({"error": f"unknown {path}"}, 404)

    def _who(self, body):
        self._json({"name": "owner"}, 200 if self._knows() else 401)

    def _validate(self, body):
        front = json.loads(body)["content"].split("---")[1]
        is_bad = 'license: "none-such"' in front
        problems = [{"message": '"license" must be one of [mit, …]'}] if is_bad else []
        self._json({"errors": problems, "warnings": []}, 400 if is_bad else 200)

    def _knows(self):
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _create(self, body):
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if not self._knows():
            return self._json({}, 401)
        if name in self.server.repositories:
            return self._json({"url": f"{self.server.endpoint}/{name}"}, 409)
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.server.repositories[name] = Repository(private=private)
        return self._json({"url": f"{self.server.endpoint}/{name}", "name": name})

    def _model(self, name, _, verb, revision, __, body):
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and not self._knows()):
            # What the Hub answers for private ones too, so that nobody learns of them.
            headers = {"X-Error-Code": "RepoNotFound"}
            return self._json(
                {"error": "Repository not found"}, 404 if self._knows() else 401, headers
            )
        if revision not in (None, "main", repository.sha):
            return self._json({}, 404, {"X-Error-Code": "RevisionNotFound"})
        if verb == "preupload":
            files = json.loads(body)["files"]
            modes = {True: "lfs", False: "regular"}
            told = [
                {"path": each["path"], "uploadMode": modes[each["path"].endswith(LARGE)],
                 "shouldIgnore": False}
                for each in files
            ]  # fmt: skip
            return self._json({"files": told})
        if verb == "commit":
            return self._commit(name, repository, body)
        if verb == "tree":
            entries = [
                {"type": "file", "path": file, **repository.listed(file)}
                for file in repository.files
            ]
            return self._json(entries)
        siblings = []
        for file in repository.files:
            entry = repository.listed(file)
            sibling = {"rfilename": file, "size": entry["size"], "blobId": entry["oid"]}
            if "lfs" in entry:
                sibling["lfs"] = entry["lfs"]
            siblings.append(sibling if parse_qs(urlsplit(self.path).query) else {"rfilename": file})
        told = {"id": name, "sha": repository.sha, "private": repository.private, "tags": []}
        return self._json({**told, "siblings": siblings, "gated": repository.gated})

    def _batch(self, name, body):
        if not self._knows():
            return self._json({}, 401)
        address = f"{self.server.endpoint}/lfs/"
        objects = [
            {**each, "actions": {"upload": {"href": address + each["oid"]}}}
            for each in json.loads(body)["objects"]
        ]
        return self._json({"transfer": "basic", "objects": objects})

    def _commit(self, name, repository, body):
        if not self._knows():
            return self._json({}, 403)
        changed = dict(repository.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changed[value["path"]] = self.server.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del changed[value["path"]]
        repository.files, repository.n_commits = changed, repository.n_commits + 1
        url = f"{self.server.endpoint}/{name}/commit/{repository.sha}"
        return self._json({"success": True, "commitOid": repository.sha, "commitUrl": url})

    def _large(self, oid, body):
        if self.command == "PUT":
            assert hashlib.sha256(body).hexdigest() == oid
            self.server.stored[oid] = body
            return self._json({})
        return self._send(200, self.server.stored[oid], {"ETag": f'"{oid}"'})

    def _resolve(self, name, revision, file, body):
        repository = self.server.repositories[name]
        if repository.gated:
            return self._json({}, 403, {"X-Error-Code": "GatedRepo"})
        data, headers = repository.files[file], {"X-Repo-Commit": repository.sha}
        if not file.endswith(LARGE):
            return self._send(200, data, {**headers, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
        oid = hashlib.sha256(data).hexdigest()
        self.server.stored.setdefault(oid, data)
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{oid}"'}
        return self._send(302, b"", {**headers, "Location": f"{self.server.storage}/lfs/{oid}"})

    def _send(self, status, data, headers):
        is_content = self.command == "GET" and status == 200
        failure = self.server.failures.pop(0) if is_content and self.server.failures else ""
        if failure.isdecimal():
            return self._json({}, int(failure))
        whole, wanted = data, re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if wanted and is_content:
            data, status = data[int(wanted[1]) :], 206
            headers["Content-Range"] = f"bytes {wanted[1]}-{len(whole) - 1}/{len(whole)}"
        if failure == "wrong":
            data = bytes(len(data))
        elif failure == "short":  # and says so: a proxy that lost the end
            data = data[: len(data) // 2]
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        if failure == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return None
        self.wfile.write(data)
        return None

    def _json(self, content, status=200, headers=None):
        data = json.dumps(content).encode()
        self.send_response(status)
        known = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        for key, value in {**known, **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while n_bytes := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(n_bytes))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = {
    "/api/whoami-v2": Handler._who,
    "/api/repos/create": Handler._create,
    "/api/validate-yaml": Handler._validate,
    r"/lfs/(\w+)": Handler._large,
    NAME.join(["/", r"\.git/info/lfs/objects/batch"]): Handler._batch,
    NAME.join(["/api/models/", r"(/(\w+)/([\w.-]+))?(/.*)?"]): Handler._model,
    NAME.join(["/", r"/resolve/([\w.-]+)/(.+)"]): Handler._resolve,
}
"""Pattern of a path → what answers it, given the pattern's groups and the request's body."""


@contextmanager
def local_hub():
    server = LocalHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
