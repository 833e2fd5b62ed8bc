"""`pentameter serve` as a process: the official client, streams that are left, and its stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
pytest.importorskip("openai", reason="the official client is not installed")

import httpx
import openai
from tiny import TOKENIZER, save_run

from pentameter.cli import serve as verb
from pentameter.cli.serve import run
from pentameter.errors import ConfigError
from pentameter.generation.loop import generate
from pentameter.model.gpt import GPT


class Server:
    """A server's process on a free port, and where it listens; requests may take
    `arrival_seconds` to arrive."""

    def __init__(self, *arguments: str, arrival_seconds: float = 30.0) -> None:
        program = (
            "import sys; from pentameter.cli.main import main; "
            "from pentameter.serve import guard, server; "
            f"guard.ARRIVAL_SECONDS = server.ARRIVAL_SECONDS = {arrival_seconds}; sys.exit(main())"
        )
        command = [sys.executable, "-c", program, "serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            if " on http://" in line:
                self.url = line.split(" on ")[1].strip()
                return
        raise AssertionError(self.process.communicate())

    def texts(self) -> int:
        """Texts that are written or wait."""
        answer = httpx.get(self.url.replace("/v1", "/health"), timeout=30)
        return sum(answer.json()["texts"].values())

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 30
        while self.texts():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def stopped(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; return the exit code and stderr."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GPT]:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return folder, save_run(folder)


@pytest.fixture(scope="module")
def server(folder: tuple[Path, GPT]) -> Iterator[Server]:
    server = Server(str(folder[0]), "--slots", "4", "--max-tokens", "1000000")
    yield server
    server.process.kill()
    server.process.communicate()


def client_of(server: Server) -> Any:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def test_the_official_client(server: Server, folder: tuple[Path, GPT]) -> None:
    client = client_of(server)
    assert [model.id for model in client.models.list()] == ["tiny"]
    (expected,) = generate(folder[1], TOKENIZER, "abc", max_new_tokens=50, seed=3)
    asked: Any = {"model": "tiny", "prompt": "abc", "max_tokens": 50, "seed": 3}
    answer = client.completions.create(**asked, logprobs=2)
    assert answer.choices[0].text == expected
    assert answer.usage.completion_tokens == 50
    assert len(answer.choices[0].logprobs.top_logprobs[0]) == 2
    stream = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(model="tin", prompt="a")
    with pytest.raises(openai.BadRequestError, match="did you mean"):
        client.completions.create(model="tiny", prompt="a", extra_body={"topk": 3})


def test_requests_whose_senders_leave_are_cancelled(server: Server) -> None:
    asked = {"prompt": "a", "max_tokens": 1_000_000}
    with httpx.stream(
        "POST", f"{server.url}/completions", json=asked | {"stream": True}, timeout=30
    ) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        next(lines)
        assert server.texts() == 1
    server.wait_until_idle()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/completions", json=asked, timeout=0.5)
    server.wait_until_idle()


HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: "
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HALF_BODY = HEAD + b"Content-Length: 100\r\n\r\n{"


def connected(server: Server, sent: bytes) -> socket.socket:
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port), timeout=30)
    connection.sendall(sent)
    return connection


def all_of(connection: socket.socket) -> bytes:
    """What a server sends until it closes the connection."""
    return b"".join(iter(lambda: connection.recv(4096), b""))


def test_half_requests_are_not_held(folder: tuple[Path, GPT]) -> None:
    server = Server(str(folder[0]), arrival_seconds=0.5)
    with connected(server, HALF_HEAD) as head, connected(server, HALF_BODY) as body:
        second = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + HALF_HEAD
        with connected(server, second) as later:
            assert all_of(later).startswith(b"HTTP/1.1 200")
        assert all_of(head) == b""
        answer = body.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"did not arrive within 0.5 s" in answer + body.recv(4096)
    assert server.stopped() == (0, "")


def test_clients_that_leave_in_their_requests_are_not_logged(folder: tuple[Path, GPT]) -> None:
    server = Server(str(folder[0]), "--grace-seconds", "0")
    for sent in (HALF_HEAD, HALF_BODY):
        connected(server, sent).close()
    with connected(server, HALF_HEAD), connected(server, HALF_BODY) as body:
        httpx.get(server.url.replace("/v1", "/health"), timeout=30)
        code, said = server.stopped()
        assert all_of(body).startswith(b"HTTP/1.1 503")
    assert code == 0
    assert "Traceback" not in said


def test_a_signal_lets_running_requests_end(server: Server) -> None:
    found: list[Any] = []

    def ask() -> None:
        found.append(httpx.post(f"{server.url}/completions", json=asked, timeout=60))

    asked = {"prompt": "ab", "max_tokens": 600}
    running = threading.Thread(target=ask)
    running.start()
    deadline = time.monotonic() + 30
    while not server.texts():
        assert time.monotonic() < deadline
    code, said = server.stopped(signal.SIGINT)
    running.join()
    assert (code, said) == (0, "")
    assert found[0].json()["usage"]["completion_tokens"] == 600


def test_a_grace_without_end_is_one(folder: tuple[Path, GPT]) -> None:
    server = Server(str(folder[0]), "--grace-seconds", "inf")
    answer = httpx.post(f"{server.url}/completions", json={"prompt": "a", "max_tokens": 2})
    assert answer.status_code == 200
    assert server.stopped() == (0, "")


def test_what_outlasts_the_grace_is_told(folder: tuple[Path, GPT]) -> None:
    server = Server(str(folder[0]), "--grace-seconds", "0.2", "--max-tokens", "1000000")
    asked = {"prompt": "a", "max_tokens": 1_000_000, "stream": True}
    with httpx.stream("POST", f"{server.url}/completions", json=asked, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert server.stopped() == (0, "")
        last = [line for line in lines if line][-1]
    assert "server_stopping" in last


def test_without_the_extra_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'pentameter\[serve\]'"):
        run(["runs/x"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a/x", "b/x"], "two models are called 'x'"),
        (["x", "--port", "70000"], "from 0 to 65535"),
        (["x", "--slots", "0"], "at least 1"),
        (["x", "--max-seconds", "nan"], "at least 0"),
        (["no/such/run", "--port", "0"], "does not exist"),
        (["x", "--api-key", ""], "--api-key is empty"),
        (["x", "--api-key", "é"], "a header cannot carry"),
        (["x", "--cors-origin", "https://A.example/x"], "did you mean https://a.example"),
        (["x", "--cors-origin", "a.example"], "is no origin"),
        (["x", "--cors-origin", "http://["], "is no origin"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(arguments)


def test_a_port_in_use_is_told_before_models_are_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port} is in use .* --port \d+ is free"):
            run(["no/such/run", "--port", str(port)])
