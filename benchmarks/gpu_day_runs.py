"""Items of a GPU day that start whole runs: kill and resume, save, sample, serve, a given time."""

from __future__ import annotations

import itertools
import json
import signal
import statistics
import subprocess
import sys
import time
import warnings
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
steps = {steps}
batch_size = {rows}
precision = "bf16"
compile = false
eval_interval = {steps}
[checkpoint]
interval = {interval}
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
    the device has the numbers of one that nobody disturbed, and repeats its bits."""
    small, log = folder / "small.toml", folder / "run.log"
    log_every = ("--log.interval", "1")
    n_steps, stops = (120, (30, 70)) if device.type == "cuda" else (40, (12, 24))
    small.write_text(SMALL.format(steps=n_steps, precision="fp64"))
    here = ("--train.device", device.type, *log_every)
    code = done(command_of(folder / "whole", small, *here), log)
    whole = losses(folder / "whole")
    killed = folder / "killed"
    for until, where in zip(stops, (device.type, "cpu"), strict=True):
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


def of_stall(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell how long a save beside training holds up a step."""
    large = folder / "large.toml"
    on_gpu = device.type == "cuda"
    sizes = {"context": 1024, "layers": 12, "width": 768, "rows": 16, "steps": 330, "interval": 110}
    if not on_gpu:
        sizes = {"context": 32, "layers": 2, "width": 48, "rows": 2, "steps": 12, "interval": 4}
    large.write_text(LARGE.format(**sizes))
    here = ("--train.device", device.type, "--log.interval", "1")
    code = done(command_of(folder / "large", large, *here), folder / "stall.log")
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
    """Tell how far logits and texts are from the CPU's, and how fast the device speaks."""
    import numpy as np

    from pentameter.config.schema import ModelConfig
    from pentameter.generation import loop
    from pentameter.model.gpt import build_model

    big = {"n_layers": 12, "d_model": 768, "context_length": 1024, "vocab_size": 50304}
    gpt2 = {**big, "attention": {"n_heads": 12}}
    prompt = np.arange(1, 33, dtype=np.int64)
    cases: list[tuple[str, dict[str, Any]]] = [("small", {"vocab_size": 256, **decoder()})]
    if device.type == "cuda":
        cases.append(("gpt2", gpt2))
    for name, keys in cases:
        config = ModelConfig(**keys)
        model = build_model(config, 0).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(6.0)  # so that the likeliest tokens are far apart and differ
        settings = loop.Generation(temperature=0.0, max_new_tokens=48)
        texts, logits = {}, {}
        for where, place in (("cpu", torch.device("cpu")), ("device", device)):
            found = loop.sampled_tokens(model.to(place), prompt, keys["vocab_size"], settings)
            texts[where] = np.array([*prompt, *(int(each[0]) for each in found)])
            with torch.inference_mode():
                seen = torch.from_numpy(texts["cpu"])[None].to(place)
                logits[where] = model(seen)[0].cpu().double()
        with torch.inference_mode():  # the device's own widths aside, the CPU is right in fp64
            exact = model.to(torch.device("cpu")).double()(torch.from_numpy(texts["cpu"])[None])[0]
        off = {where: float((each - exact).abs().max()) for where, each in logits.items()}
        differing = np.flatnonzero(texts["cpu"] != texts["device"])
        gap = None
        if len(differing):  # the first token that differs was chosen after the one before it
            best = exact[differing[0] - 1].topk(2).values
            gap = float(best[0] - best[1])
        tell(
            texts=name,
            logits_off=off,
            largest_logit=float(exact.abs().max()),
            ok=off["device"] <= 8 * off["cpu"] + 1e-6 and (gap is None or gap < 8 * off["cpu"]),
            first_difference=int(differing[0]) if len(differing) else None,
            gap_there=gap,
            of_tokens=len(set(texts["cpu"].tolist())),
        )
    of_speed(tell, device, config, prompt)


def of_speed(tell: Tell, device: torch.device, config: Any, prompt: Any) -> None:
    """Tell tokens a second of sampling and of the server's passes, step by step and, on a GPU,
    replayed, with the shapes that give equal bits."""
    import numpy as np

    from pentameter.generation import loop
    from pentameter.model.gpt import build_model
    from pentameter.serve.passes import Slots

    replays, on_gpu = loop.can_be_captured, device.type == "cuda"
    n_first, n_timed = (20, 60) if on_gpu else (2, 6)
    cases = list(itertools.product((1, 16), (False, True) if on_gpu else (False,)))
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(config, 0, device=device).eval().to(dtype)
        chosen = {}
        for n, is_replayed in cases:
            loop.can_be_captured = replays if is_replayed else lambda *_: False
            settings = loop.Generation(temperature=0.0, num_samples=n)
            found = loop.sampled_tokens(model, prompt, config.vocab_size, settings)
            with warnings.catch_warnings(record=True) as warned:
                start = time.perf_counter()
                tokens = [next(found) for _ in range(n_first)]
                first = time.perf_counter()
                tokens += itertools.islice(found, n_timed)
            rate = n_timed * n / (time.perf_counter() - first)
            chosen[is_replayed] = np.stack(tokens)
            tell(
                sampled=str(dtype),
                texts=n,
                replayed=is_replayed,
                first_tokens_seconds=first - start,
                tokens_per_second=rate,
                same_as_steps=float((chosen[is_replayed] == chosen[False]).mean()),
                warned=[str(each.message) for each in warned],
            )
        loop.can_be_captured = replays
        slots = Slots(model, config.vocab_size, 16)
        start = time.perf_counter()
        shapes = slots.find_shapes()
        found_in = time.perf_counter() - start
        replay_on = slots._steps.is_on
        for n, is_replayed in cases:
            slots._steps.is_on = replay_on and is_replayed
            with warnings.catch_warnings(record=True) as warned:
                slots.write(dict.fromkeys(range(n), (5, 10, 11)))
                start = time.perf_counter()
                for position in range(11, 11 + n_timed):
                    slots.write(dict.fromkeys(range(n), (5, position, position + 1)))
            tell(
                served=str(dtype),
                texts=n,
                replayed=is_replayed,
                tokens_per_second=n_timed * n / (time.perf_counter() - start),
                shapes=str(shapes),
                found_in=found_in,
                warned=[str(each.message) for each in warned],
            )


def of_time(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell when a run of a given time ends, and what it chose."""
    asked = 45 if device.type == "cuda" else 15
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
