"""Runs of seconds in one process, for the tests of the loop."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.checkpoint.format.manifest import FileRecord, read_manifest
from pentameter.config.schema import Config
from pentameter.train.loop import Trainer

OF_TIME = {"seconds", "step_seconds", "tokens_per_second", "mfu", "peak_memory_bytes", "run_id"}
OF_TIME |= {"eta_seconds", "stall_seconds", "ceiling_flops", "bytes", "time"}
OF_TIME |= {"slowest", "own_seconds", "others_seconds", "waited"}


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


def recorded(run: Path):
    """The events of metrics.jsonl without clocks, sizes and the run's own path."""
    kept = [{k: v for k, v in each.items() if k not in OF_TIME} for each in events(run)]
    return json.loads(json.dumps(kept).replace(str(run), "RUN"))


def hashes(run: Path, step: int) -> dict[str, str]:
    """The sha256 of each file of tensors in a checkpoint."""
    manifest = open_checkpoint(run / "checkpoints" / f"step-{step:08d}").manifest
    return {f.name: f.sha256 for f in manifest.files if f.name.endswith(".safetensors")}


def seal(checkpoint, **changes):
    """Write state.json with `changes` (None removes a key), and a manifest that agrees with it."""
    path = checkpoint / "state.json"
    state = {**json.loads(path.read_text()), **changes}
    data = json.dumps({k: v for k, v in state.items() if v != "absent"}).encode()
    path.write_bytes(data)
    manifest = read_manifest(checkpoint)
    files = tuple(
        FileRecord(each.name, len(data), hashlib.sha256(data).hexdigest())
        if each.name == "state.json"
        else each
        for each in manifest.files
    )
    sealed = dataclasses.replace(manifest, files=files)
    (checkpoint / "manifest.json").write_bytes(sealed.to_bytes())
