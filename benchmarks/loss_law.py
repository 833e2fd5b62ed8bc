"""Short runs from which the law behind `train --time` is fitted: size, tokens, passes, vocabulary.

    OMP_NUM_THREADS=1 python benchmarks/loss_law.py DESIGN.jsonl --out RUNS.jsonl

Each run of a design trains the recipe that `--time` had when the law was fitted, for a given number
of FLOPs, whatever the machine does beside it, and writes one line: its settings, its tokens and
FLOPs, and the loss of the held-out text in bits per byte, by which vocabularies can be compared.
Lines that are there are not run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import pentameter as pm
from pentameter.config.files.load import load_config
from pentameter.config.schema import Config
from pentameter.data.open_dataset import open_dataset
from pentameter.planning.plan import make_plan

RECIPE: dict[str, Any] = {
    "model": {
        "norm": "rmsnorm",
        "positions": "rotary",
        "attention": {"qk_norm": "head"},
        "feed_forward": {"activation": "relu2"},
    },
    "optimizer": {"name": "muon"},
    "schedule": {"name": "linear", "min_learning_rate": 0.0},
}


def config_of(run: dict[str, Any], text: str) -> Config:
    """The configuration of a run, of as many steps as its `flops` are."""
    data = {
        "path": text,
        "tokenizer": run.get("tokenizer", "char"),
        "max_bytes": run.get("max_bytes"),
        "validation_fraction": run.get("val", 0.02),
    }
    changed: dict[str, Any] = {"data": data, "train": {"sample_interval": None, "compile": True}}
    if not run.get("quickstart"):
        d, context = run["d"], run.get("context", 256)
        model = {"d_model": d, "n_layers": run["layers"], "attention": {"n_heads": max(1, d // 32)}}
        batch = {"batch_size": run.get("batch", 2048) // context}
        rate = {"learning_rate": run.get("rate", 3e-3), "weight_decay": run.get("decay", 0.1)}
        changed = {
            "model": {**RECIPE["model"], **model, "context_length": context},
            "data": data,
            "optimizer": {**RECIPE["optimizer"], **rate},
            "schedule": RECIPE["schedule"],
            "train": {**changed["train"], **batch},
        }
    plan = make_plan(
        load_config("quickstart", changed),
        open_dataset(load_config("quickstart", changed).data).vocab_size,
    )
    steps = max(10, round(run["flops"] / plan.least_flops_per_token / plan.tokens_per_step))
    changed["train"] |= {"steps": steps, "eval_interval": steps}
    warmup = {"warmup_steps": max(5, steps // 20)}
    changed["schedule"] = {**changed.get("schedule", {}), **warmup}
    return load_config("quickstart", changed)


class Recorder:
    """The hook that keeps a run's last evaluation and the seconds of its steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step(self, run: object, step: Any) -> None:
        self.seconds.append(step.step_seconds)
        self.losses.append(step.loss)

    def on_eval(self, run: object, metrics: Any) -> None:
        self.metrics = metrics


def result(run: dict[str, Any], text: str) -> dict[str, Any]:
    """Train a run and return its line."""
    config = config_of(run, text)
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pm.Trainer(config, run_dir=Path(folder) / "run", hooks=[recorder], quiet=True)
        trainer.fit()
    plan, dataset = trainer.run.plan, trainer.run.dataset
    seconds = sorted(recorder.seconds[2:])
    last = recorder.losses[-max(1, len(recorder.losses) // 20) :]
    return {
        **run,
        "text": Path(text).stem,
        "parameters": plan.n_parameters,
        "vocab": dataset.vocab_size,
        "train_tokens": dataset.split("train").n_tokens,
        "steps": plan.steps,
        "tokens": plan.total_tokens,
        "total_flops": plan.total_tokens * plan.least_flops_per_token,
        "step_seconds": seconds[len(seconds) // 4],
        "train_loss": sum(last) / len(last),
        "loss": recorder.metrics.loss,
        "bits_per_byte": recorder.metrics.bits_per_byte,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("design", type=Path, help="JSON lines, a run each")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    done = []
    if arguments.out.exists():
        done = [json.loads(line)["run"] for line in arguments.out.read_text().splitlines()]
    for line in arguments.design.read_text().splitlines():
        run = json.loads(line)
        if run in done:
            continue
        text = run.pop("text")
        found = {"run": {"text": text, **run}, **result(run, text)}
        with arguments.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
