"""Items of a GPU day that start whole runs: kill and resume, save, sample, serve, a given time."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu_day_cases import decoder

Tell = Callable[..., None]
SMALL = """
name = "day"
[data]
corpus = "grammar"
tokenizer = "char"
[model]
context_length = 64
n_layers = 2
d_model = 64
[model.attention]
n_heads = 4
[train]
steps = {steps}
batch_size = 8
micro_batch_size = 4
precision = "{precision}"
eval_interval = {steps}
[checkpoint]
interval = 10
"""
LARGE = """
name = "day"
[data]
corpus = "grammar"
tokenizer = "char"
[model]
vocab_multiple = 128
context_length = {context}
n_layers = {layers}
d_model = {width}
[model.attention]
n_heads = 12
[train]
steps = 60
batch_size = {rows}
precision = "bf16"
compile = false
eval_interval = 60
[checkpoint]
interval = 15
"""


def command_of(folder: Path, config: Path, *options: str) -> list[str]:
    """Return the command that trains `config` into `folder`."""
    train = [sys.executable, "-m", "pentameter", "train", str(config), "--run-dir", str(folder)]
    return [*train, *options]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return a run's events of a kind."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["event"] == kind]


def losses(folder: Path) -> dict[int, float]:
    """Return a run's losses by step."""
    return {row["step"]: row["loss"] for row in events(folder, "train")}


def done(command: list[str], log: Path) -> int:
    """Run a command into a log, and return its exit code."""
    with log.open("ab") as file:
        return subprocess.run(command, stdout=file, stderr=file, check=False).returncode


def of_run(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell whether a run that is killed on the device, goes on on the CPU, is killed and goes on on
    the device has the numbers of one that nobody disturbed; and how long a save holds up a step."""
    small, log = folder / "small.toml", folder / "run.log"
    log_every = ("--log.interval", "1")
    small.write_text(SMALL.format(steps=120, precision="fp64"))
    here = ("--train.device", device.type, *log_every)
    code = done(command_of(folder / "whole", small, *here), log)
    whole = losses(folder / "whole")
    killed = folder / "killed"
    for until, where in ((30, device.type), (70, "cpu")):
        with log.open("ab") as file:
            command = command_of(killed, small, *log_every, "--train.device", where)
            child = subprocess.Popen(command, stdout=file, stderr=file)
            while child.poll() is None and max(losses(killed), default=0) < until:
                time.sleep(0.02)
            child.send_signal(signal.SIGKILL)
            child.wait()
    ended = done(command_of(killed, small, *here), log)
    found = losses(killed)
    off = max((abs(found[step] / whole[step] - 1) for step in whole if step in found), default=9.0)
    again = folder / "again"
    done(command_of(again, small, *here), log)
    tell(
        undisturbed=code,
        resumed=ended,
        steps=len(whole),
        same_steps=sorted(found) == sorted(whole),
        worst_loss_difference=off,
        resumes=len(events(killed, "resume")),
        repeats_its_bits=losses(again) == whole,
    )
    large = folder / "large.toml"
    on_gpu = device.type == "cuda"
    sizes = {"context": 1024, "layers": 12, "width": 768, "rows": 16}
    if not on_gpu:
        sizes = {"context": 32, "layers": 2, "width": 48, "rows": 2}
    large.write_text(LARGE.format(**sizes))
    code = done(command_of(folder / "large", large, *here), log)
    seconds = [row["step_seconds"] for row in events(folder / "large", "train")]
    saves = events(folder / "large", "checkpoint")
    tell(
        large=code,
        step_ms=1000 * statistics.median(seconds) if seconds else None,
        slowest_steps_ms=[round(1000 * each) for each in sorted(seconds)[-4:]],
        save_seconds=[round(row["seconds"], 2) for row in saves],
        stall_seconds=[round(row["stall_seconds"] or 0, 3) for row in saves],
        bytes=[row.get("bytes") for row in saves][-1:],
    )


def of_speak(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell whether texts are those of the CPU in fp32, and tokens a second of sampling and of the
    server's passes, with the shapes that give equal bits."""
    import numpy as np

    from pentameter.config.schema import ModelConfig
    from pentameter.generation.loop import Generation, sampled_tokens
    from pentameter.model.gpt import build_model
    from pentameter.serve.passes import Slots

    big = {"n_layers": 12, "d_model": 768, "context_length": 1024, "vocab_size": 50304}
    gpt2 = {**big, "attention": {"n_heads": 12}}
    prompt = np.arange(1, 33, dtype=np.int64)
    cases: list[tuple[str, dict[str, Any]]] = [("small", {"vocab_size": 256, **decoder()})]
    if device.type == "cuda":
        cases.append(("gpt2", gpt2))
    for name, keys in cases:
        config = ModelConfig(**keys)
        texts = {}
        for where in ("cpu", device.type):
            model = build_model(config, 0, device=torch.device(where)).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(6.0)  # so that the likeliest tokens are far apart and differ
            tokens = sampled_tokens(
                model, prompt, keys["vocab_size"], Generation(temperature=0.0, max_new_tokens=48)
            )
            texts[where] = [int(each[0]) for each in tokens]
        tell(texts=name, equal=texts["cpu"] == texts[device.type], of_tokens=len(set(texts["cpu"])))
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(config, 0, device=device).eval().to(dtype)
        for n in (1, 16):
            settings = Generation(temperature=0.0, max_new_tokens=100, num_samples=n)
            found = sampled_tokens(model, prompt, config.vocab_size, settings)
            for _ in range(20):
                next(found)
            start = time.perf_counter()
            n_found = sum(1 for _ in found)
            tell(
                sampled=str(dtype),
                texts=n,
                tokens_per_second=n * n_found / (time.perf_counter() - start),
            )
        slots = Slots(model, config.vocab_size, 16)
        start = time.perf_counter()
        shapes = slots.find_shapes()
        found_in = time.perf_counter() - start
        for n in (1, 16):
            slots.write(dict.fromkeys(range(n), (5, 10)))
            start = time.perf_counter()
            for position in range(11, 61):
                slots.write(dict.fromkeys(range(n), (5, position)))
            rate = 50 * n / (time.perf_counter() - start)
            tell(
                served=str(dtype),
                texts=n,
                tokens_per_second=rate,
                shapes=str(shapes),
                found_in=found_in,
            )


def of_time(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell when a run of a given time ends, and what it chose."""
    asked = 45 if device.type == "cuda" else 20
    text = folder / "text.txt"
    from pentameter.config.data_schema import GrammarConfig
    from pentameter.data.corpora.grammar import grammar_text

    text.write_text("".join(grammar_text(GrammarConfig())))
    start = time.perf_counter()
    options = ("--time", f"{asked}s", "--train.device", device.type)
    code = done(command_of(folder / "timed", text, *options), folder / "time.log")
    took = time.perf_counter() - start
    validations = [row["loss"] for row in events(folder / "timed", "eval")]
    steps = max((row["step"] for row in events(folder / "timed", "train")), default=0)
    said = (folder / "time.log").read_text().splitlines()[-40:]
    tell(time=asked, took=took, exit=code, steps=steps, validations=validations, said=said)
