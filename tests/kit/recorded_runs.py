"""Folders of runs, written without training: fixtures for what reads them."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CONFIG = """
name = "small-gpt"
seed = 7
[model]
n_layers = 2
d_model = 32
context_length = 64

[model.attention]
n_heads = 2
[data]
corpus = "grammar"
[data.grammar]
alphabet = "ab<"
[optimizer]
betas = [0.9, 0.99]
clip_norm = 1.0
[train]
steps = 400
batch_size = 4
sample_prompt = "\\n"
"""

MakeRun = Callable[..., Path]
Events = list[dict[str, Any]]


def _run_events(n_steps: int, interval: int = 10, **start: Any) -> Events:
    """The events of a plausible run: loss falls, validation turns up again."""
    noise = random.Random(0)
    events: Events = [
        {"event": "start", "step": 0, "run_id": "ab", "parameters": 10_745_088,
         "tokens_per_step": 256, "steps": n_steps, "device": "Some CPU", "precision": "bf16",
         "ceiling_flops": 2.2e12} | start
    ]  # fmt: skip
    for step in range(interval, n_steps + 1, interval):
        loss = 1 + 3 * math.exp(-step / (n_steps / 8))
        events.append(
            {"event": "train", "step": step, "tokens": step * 256,
             "loss": loss + noise.gauss(0, 0.02), "learning_rate": 1e-3 * (1 - step / n_steps),
             "grad_norm": 0.5 + abs(noise.gauss(0, 0.1)), "step_seconds": 0.1,
             "tokens_per_second": 2560.0, "mfu": 0.4, "peak_memory_bytes": 10**9,
             "eta_seconds": 1.0}
        )  # fmt: skip
        if step % (10 * interval) == 0:
            validation = loss + 0.1 + (step / n_steps) ** 4
            events += [
                {"event": "eval", "step": step, "split": "val", "loss": validation,
                 "perplexity": math.exp(validation), "bits_per_byte": validation / math.log(2),
                 "best": False},
                {"event": "checkpoint", "step": step, "path": f"checkpoints/step-{step:08d}",
                 "bytes": 1_500_000, "seconds": 0.2},
            ]  # fmt: skip
    return events


END = {"event": "end", "step": 400, "reason": "completed", "seconds": 3723.0}


@pytest.fixture
def run_events() -> Callable[..., Events]:
    """`run_events(n_steps, interval=10, **more of the start event)` without an end."""
    return _run_events


@pytest.fixture
def run_end() -> dict[str, Any]:
    return dict(END)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Writes a run folder: events or the text of metrics.jsonl, and samples by step."""

    def make(
        events: Events | str | None = None,
        samples: dict[int, str] | None = None,
        config: str | None = CONFIG,
        **files: str,
    ) -> Path:
        folder = tmp_path / "runs" / "a run"
        (folder / "samples").mkdir(parents=True)
        if events is None:
            events = [*_run_events(400), END]
        if not isinstance(events, str):
            events = "".join(json.dumps(event) + "\n" for event in events)
        (folder / "metrics.jsonl").write_text(events, encoding="utf-8")
        if config is not None:
            (folder / "config.toml").write_text(config, encoding="utf-8")
        for step, text in (samples or {}).items():
            path = folder / "samples" / f"step-{step:08d}.txt"
            path.write_text(text, encoding="utf-8")
        for name, text in files.items():
            (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")
        return folder

    return make
