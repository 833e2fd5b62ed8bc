"""The run folder: who may write it, what it holds at the start, and where a run continues."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentameter.checkpoint.files import write_atomic
from pentameter.checkpoint.opening import Checkpoint, open_checkpoint
from pentameter.checkpoint.store import CheckpointStore
from pentameter.config.load import config_hash, diff_configs, load_config, to_toml
from pentameter.errors import ConfigError, CorruptError, StorageError
from pentameter.plan.plan import Plan
from pentameter.train.metrics import rewind_metrics

RESUME_WORDS = ("auto", "never", "must")


@dataclass(frozen=True)
class RunFolder:
    """An opened run folder and the checkpoint to continue from, if there is one."""

    path: Path
    run_id: str
    store: CheckpointStore
    checkpoint: Checkpoint | None

    @property
    def metrics_path(self) -> Path:
        """metrics.jsonl."""
        return self.path / "metrics.jsonl"

    @property
    def log_path(self) -> Path:
        """log.txt, what the console said."""
        return self.path / "log.txt"

    def sample_path(self, step: int) -> Path:
        """The file of the text sampled at `step`."""
        return self.path / "samples" / f"step-{step:08d}.txt"

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Record versions and devices of this start; earlier starts are kept beside it."""
        path = self.path / "environment.json"
        earlier: list[Any] = []
        if path.exists():
            try:
                before = json.loads(path.read_text(encoding="utf-8"))
                earlier = [*before.pop("earlier_starts", []), before]
            except (ValueError, AttributeError):
                earlier = []  # only a record for humans: a damaged one must not stop a resume
        record = {**environment, "earlier_starts": earlier}
        write_atomic(path, json.dumps(record, indent=2).encode() + b"\n")


def open_run_folder(path: Path, plan: Plan, *, resume: str = "auto") -> RunFolder:
    """The folder of `plan`'s run, created, or rewound to the checkpoint it continues from.

    `resume` is `auto` (continue a run of the same configuration, else start), `never` (only
    start), `must` (only continue) or the path of a checkpoint to continue from. The caller holds
    the folder's lock. Raises ConfigError when the folder holds another configuration's run,
    saying what differs; nothing in the folder has been touched then.
    """
    exists = (path / "config.toml").exists()
    if exists:
        _check_resumable(path, plan, resume)
        run_id = _read_run_id(path)
        _describe(path, plan, run_id)  # what may change on resume (steps, intervals) may have
    elif resume == "must":
        raise ConfigError(f"--resume must: there is no run in {path}; use --resume auto to start")
    else:
        run_id = uuid.uuid4().hex
        _create(path, plan, run_id)
    store = CheckpointStore(
        path / "checkpoints", run_id=run_id, config_hash=config_hash(plan.config)
    )
    store.clean()
    checkpoint = store.latest()
    if resume not in RESUME_WORDS:
        given = open_checkpoint(Path(resume))
        if checkpoint is None or checkpoint.path.resolve() != given.path.resolve():
            _check_foreign(checkpoint, given, path)
            checkpoint = given
    elif resume == "must" and checkpoint is None:
        raise ConfigError(
            f"--resume must: {path} has no checkpoint yet; use --resume auto to start it again"
        )
    folder = RunFolder(path, run_id, store, checkpoint)
    _rewind(folder)
    return folder


def _check_resumable(path: Path, plan: Plan, resume: str) -> None:
    if resume == "never":
        raise ConfigError(
            f"--resume never: {path} already holds a run; give another --run-dir or --name, "
            "or remove the folder"
        )
    if resume not in RESUME_WORDS:
        return  # the user named a checkpoint: what differs is what they want to change
    existing = load_config(path / "config.toml")
    if config_hash(existing) != config_hash(plan.config):
        differences = "\n  ".join(diff_configs(existing, plan.config))
        raise ConfigError(
            f"{path} holds a run of another configuration, which differs in\n  {differences}\n"
            "use the same values to continue it, or another --run-dir or --name to start anew"
        )


def _check_foreign(own: Checkpoint | None, given: Checkpoint, path: Path) -> None:
    if own is not None:
        raise ConfigError(
            f"--resume {given.path}: {path} has its own checkpoint at step {own.step}; give "
            "another --run-dir to branch off from that checkpoint"
        )


def _create(path: Path, plan: Plan, run_id: str) -> None:
    try:
        (path / "samples").mkdir(parents=True, exist_ok=True)
        (path / "checkpoints").mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot create the run folder {path}: {error.strerror}") from error
    _describe(path, plan, run_id)


def _describe(path: Path, plan: Plan, run_id: str) -> None:
    """Write plan.json and config.toml; the latter last, since its presence makes it a run."""
    record = {"run_id": run_id, **plan.to_json()}
    write_atomic(path / "plan.json", json.dumps(record, indent=2).encode() + b"\n")
    write_atomic(path / "config.toml", to_toml(plan.config).encode())


def _read_run_id(path: Path) -> str:
    try:
        return str(json.loads((path / "plan.json").read_text(encoding="utf-8"))["run_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptError(
            f"{path / 'plan.json'} is missing or damaged, so the run's checkpoints cannot be "
            "recognised; continue in a new folder with --run-dir NEW --resume "
            f"{path}/checkpoints/step-…"
        ) from error


def _rewind(folder: RunFolder) -> None:
    """Make the logs end where the checkpoint was saved; without one of its own they start again."""
    checkpoint = folder.checkpoint
    if checkpoint is None or not checkpoint.path.is_relative_to(folder.path.resolve()):
        last_step, metrics_bytes, log_bytes, event = -1, 0, 0, None
    else:
        last_step = checkpoint.step
        metrics_bytes, log_bytes = checkpoint.state["metrics_bytes"], checkpoint.state["log_bytes"]
        event = {
            "step": checkpoint.step,
            "path": f"checkpoints/{checkpoint.path.name}",
            "bytes": checkpoint.manifest.n_bytes,
            "seconds": None,
        }
    rewind_metrics(folder.metrics_path, n_bytes=metrics_bytes, checkpoint=event)
    if folder.log_path.exists():
        write_atomic(folder.log_path, folder.log_path.read_bytes()[:log_bytes])
    for sample in (folder.path / "samples").glob("step-*.txt"):
        if sample.stem[5:].isdigit() and int(sample.stem[5:]) > last_step:
            sample.unlink()
