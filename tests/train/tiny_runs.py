"""Runs of seconds in one process, for the tests of the loop."""

from __future__ import annotations

import json
from pathlib import Path

from pentameter.config.schema import Config
from pentameter.train.loop import Trainer


def config(**sections) -> Config:
    base = {
        "name": "tiny",
        "model": {"context_length": 16, "n_layers": 1, "n_heads": 2, "d_model": 16},
        "data": {"corpus": "grammar", "grammar": {"n_characters": 3000}},
        "optimizer": {"learning_rate": 1e-2},
        "train": {
            "steps": 12,
            "batch_size": 4,
            "eval_interval": 4,
            "precision": "fp32",
            "compile": False,
        },
        "log": {"interval": 1},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return Config.model_validate(base)


def fit(run_dir, **arguments):
    sections = arguments.pop("sections", {})
    trainer = Trainer(config(**sections), run_dir=run_dir, quiet=True, **arguments)
    end = trainer.fit()
    return trainer.run, end


def events(run_dir: Path, kind: str | None = None):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [r for r in records if kind is None or r["event"] == kind]
