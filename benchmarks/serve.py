"""Serving speed: streams of `pentameter serve` against `pentameter sample`, the time to a first
token, and what a thousand requests leave behind.

The server answers 1, 4 and 16 streams at a time on this machine, and takes turns with
`sample --num-samples` of as many. Then come 1,000 requests, a third of which leave early, and every
answer is compared with the one that the same request got alone.

    python benchmarks/serve.py [--model character|gpt2-124m] [--streams 1 4 16] [--new-tokens 256]
        [--rounds 3] [--requests 1000] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.config.data_schema import DataConfig
from pentameter.config.files.write import to_toml
from pentameter.config.model.attention import AttentionConfig
from pentameter.config.schema import Config, ModelConfig, TrainConfig
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.model.gpt import build_model

MODELS = {
    "character": ModelConfig(
        vocab_size=65,
        context_length=256,
        n_layers=6,
        d_model=384,
        attention=AttentionConfig(n_heads=6),
    ),
    "gpt2-124m": ModelConfig(
        vocab_size=50257,
        context_length=1024,
        n_layers=12,
        d_model=768,
        attention=AttentionConfig(n_heads=12),
    ),
}
AIM = 0.9  # of sampling 16 texts as one batch, at 16 streams
CONCURRENT = 24
PROMPT = [0]
FIRST = 0x20000  # characters of the tokenizer from here on: ideographs, as many as one likes


def tokenizer_for(vocab_size: int) -> CharTokenizer:
    return CharTokenizer("".join(map(chr, range(FIRST, FIRST + vocab_size))))


def save_run(folder: Path, config: ModelConfig) -> None:
    """Write a run folder with random weights."""
    whole = Config(model=config, data=DataConfig(corpus="stdlib"), train=TrainConfig(batch_size=1))
    assert config.vocab_size is not None
    tokenizer = tokenizer_for(config.vocab_size)
    files = {"config.toml": to_toml(whole).encode(), "tokenizer.json": tokenizer.to_bytes()}
    store = CheckpointStore(folder / "checkpoints", run_id="r", config_hash="h")
    store.save(Contents(1, {"model": model_state(build_model(config, 1))}, {"step": 1}, files))


class Server:
    """`pentameter serve` in a process."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "pentameter", "serve", str(folder), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.introduction = ""
        for line in self.process.stdout:
            if " on http://" in line:
                self.port = int(line.rpartition(":")[2].partition("/")[0])
                return
            self.introduction += line
        raise SystemExit("the server did not start")

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


@dataclass
class Answer:
    """A stream's end: `outcome` is done, left (by us), refused or lost."""

    outcome: str
    first_seconds: float = float("nan")
    text: str = ""
    n_tokens: int = 0
    status: int = 0
    seconds: float = field(default=0.0)


async def ask(port: int, leave_after: float | None = None, **fields: Any) -> Answer:
    """Stream one request over a connection of its own; with `leave_after` close it by then."""
    body = {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}} | fields
    content = json.dumps(body).encode()
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = Answer("lost")
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(content), content)
        )
        async with asyncio.timeout(leave_after):
            async for line in reader:
                if line.startswith(b"HTTP/1.1"):
                    answer.status = int(line.split()[1])
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    answer.outcome = "done"
                    break
                event = json.loads(line[6:])
                if "usage" in event:
                    answer.n_tokens = event["usage"]["completion_tokens"]
                elif event.get("choices"):
                    if not answer.text:
                        answer.first_seconds = time.perf_counter() - start
                    answer.text += event["choices"][0]["text"]
        if answer.status == 503:
            answer.outcome = "refused"
    except TimeoutError:
        answer.outcome = "left"
    finally:
        writer.close()
    answer.seconds = time.perf_counter() - start
    return answer


async def streams(port: int, n_streams: int, n_tokens: int) -> tuple[float, list[float]]:
    """Return tokens per second of streams begun at once, and each one's seconds to its first."""
    start = time.perf_counter()
    asked = [ask(port, max_tokens=n_tokens, seed=n) for n in range(n_streams)]
    answers = await asyncio.gather(*asked)
    seconds = time.perf_counter() - start
    assert all(answer.n_tokens == n_tokens for answer in answers), answers
    return n_streams * n_tokens / seconds, [answer.first_seconds for answer in answers]


def sampled(folder: Path, n_samples: int, n_tokens: int) -> float:
    """Return tokens per second of `sample`, its start left out."""
    command = [sys.executable, "-m", "pentameter", "sample", str(folder), "--json"]
    command += ["--prompt", chr(FIRST + PROMPT[0]), "--num-samples", str(n_samples)]
    command += ["--max-new-tokens", str(n_tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    rate: float = json.loads(done.stdout)["tokens_per_second"]
    return rate


def measure_streams(server: Server, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the table's rows, by the number of streams; medians over alternating rounds."""
    found = {}
    for n in asked.streams:
        asyncio.run(streams(server.port, n, 8))
        served, alone, first = [], [], list[float]()
        for _ in range(asked.rounds):
            alone.append(sampled(folder, n, asked.new_tokens))
            rate, seconds = asyncio.run(streams(server.port, n, asked.new_tokens))
            served.append(rate)
            first += seconds
        ratios = [a / b for a, b in zip(served, alone, strict=True)]
        found[n] = {
            "serve_tokens_per_second": statistics.median(served),
            "sample_tokens_per_second": statistics.median(alone),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "first_p50_seconds": float(np.percentile(first, 50)),
            "first_p99_seconds": float(np.percentile(first, 99)),
        }
    return found


async def storm(server: Server, n_requests: int, n_tokens: int) -> dict[str, Any]:
    """Return what became of many requests, a third of which leave early."""
    chance = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {
            "max_tokens": chance.randrange(1, n_tokens),
            "seed": kind,
            "prompt": [chance.randrange(60) for _ in range(chance.choice([1, 5, 70, 200]))],
            "temperature": chance.choice([0, 0.8, 1]),
        }
        for kind in range(20)
    ]
    alone = [(await ask(server.port, **kind)).text for kind in kinds]
    outcomes, different, first = list[str](), 0, list[float]()
    memory = [server.resident_bytes()]
    gate = asyncio.Semaphore(CONCURRENT)

    async def one(number: int) -> None:
        nonlocal different
        kind = chance.randrange(len(kinds))
        leave_after = chance.uniform(0, 1.0) if number % 3 == 0 else None
        async with gate:
            answer = await ask(server.port, leave_after, **kinds[kind])
        outcomes.append(answer.outcome)
        if answer.outcome == "done":
            different += answer.text != alone[kind]
            first.append(answer.first_seconds)
        if len(outcomes) % (n_requests // 4) == 0:
            memory.append(server.resident_bytes())

    start = time.perf_counter()
    await asyncio.gather(*map(one, range(n_requests)))
    seconds = time.perf_counter() - start
    await asyncio.sleep(0.5)
    health = await _health(server.port)
    return {
        "requests": n_requests,
        "seconds": seconds,
        **{name: outcomes.count(name) for name in ("done", "left", "refused", "lost")},
        "texts_unlike_alone": different,
        "texts_under_way_afterwards": sum(health["texts"].values()),
        "first_p50_seconds": float(np.percentile(first, 50)),
        "first_p99_seconds": float(np.percentile(first, 99)),
        "resident_bytes": memory,
    }


async def _health(port: int) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="character")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()

    config = MODELS[asked.model]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "model"
        save_run(run, config)
        server = Server(run)
        try:
            found = measure_streams(server, run, asked)
            many = (
                asyncio.run(storm(server, asked.requests, min(64, asked.new_tokens)))
                if asked.requests
                else {}
            )
        finally:
            code = server.stop()
    results = {"torch": torch.__version__, "streams": found, "storm": many, "exit_code": code}
    if asked.json:
        print(json.dumps(results))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {asked.model}")
    print(server.introduction, end="")
    print("streams  serve tok/s  sample tok/s  ratio  first token p50, p99 ms")
    for n, row in found.items():
        print(
            f"{n:>7} {row['serve_tokens_per_second']:>12.1f} "
            f"{row['sample_tokens_per_second']:>13.1f} {row['ratio']:>6.2f} "
            f"{1e3 * row['first_p50_seconds']:>16.1f} {1e3 * row['first_p99_seconds']:.1f}"
        )
    print(f"aim at 16 streams: {AIM} of sample; exit code after SIGTERM: {code}")
    print(json.dumps(many))


if __name__ == "__main__":
    main()
