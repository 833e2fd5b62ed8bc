"""The run folder: who may write it, what it holds at the start, and where a run continues."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from pentameter.checkpoint.initial_weights import InitialWeights, check_origin, initial_weights
from pentameter.checkpoint.manifest import MAX_JSON_BYTES, decode_json
from pentameter.checkpoint.opening import Checkpoint, open_checkpoint
from pentameter.checkpoint.store import CheckpointStore, step_folder_name
from pentameter.config.load import config_hash, to_toml
from pentameter.config.schema import Config
from pentameter.data.shards.dataset import Dataset
from pentameter.disk.atomic import (
    is_temporary,
    make_folder,
    read_regular,
    storage_errors,
    write_atomic,
)
from pentameter.errors import ConfigError, CorruptError, StorageError
from pentameter.planning.plan import Plan
from pentameter.processes.world import World
from pentameter.train.continuing import (
    check_same_run,
    check_start_step,
    no_checkpoint,
    read_identity,
    refuse_foreign,
    step_folders,
)
from pentameter.train.metrics import checkpoint_event, rewind_metrics
from pentameter.train.state import RunRecord, saved_state

RESUME_WORDS = ("auto", "never", "must", "extend")
VISIBLE_SECONDS = 30.0  # until a network file system shows what another machine has written
RANK_LOGS = "logs"


@dataclass(frozen=True)
class RunFolder:
    """An opened run folder and the checkpoint to continue from, if there is one."""

    path: Path
    run_id: str
    store: CheckpointStore
    checkpoint: Checkpoint | None
    initial_weights: InitialWeights | None = None
    """Those of another model that the run begins with, where there is no checkpoint yet."""

    def log_path_of(self, rank: int) -> Path:
        """log.txt; of another process than the main one logs/rank-00001.txt, a log of its own."""
        return self.path / RANK_LOGS / f"rank-{rank:05d}.txt" if rank else self.log_path

    @property
    def metrics_path(self) -> Path:
        """metrics.jsonl."""
        return self.path / "metrics.jsonl"

    @property
    def log_path(self) -> Path:
        """log.txt, what the console said."""
        return self.path / "log.txt"

    def write_sample(self, step: int, text: str) -> None:
        """Keep the text sampled at `step`. Raises StorageError."""
        path = self.path / "samples" / f"{step_folder_name(step)}.txt"
        make_folder(path.parent)
        write_atomic(path, text.encode("utf-8"))

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Record versions and devices of this start; earlier starts are kept beside it.

        Raises StorageError.
        """
        path = self.path / "environment.json"
        record = {**environment, "earlier_starts": _earlier_starts(path)}
        write_atomic(path, json.dumps(record, indent=2).encode() + b"\n")


def _earlier_starts(path: Path) -> list[Any]:
    """The content of environment.json; nothing where it is damaged: it is a record for humans."""
    with suppress(CorruptError, StorageError, RecursionError):
        before = decode_json(read_regular(path, max_bytes=MAX_JSON_BYTES), path)
        if isinstance(before, dict):
            starts = before.pop("earlier_starts", [])
            json.dumps([starts, before], indent=2)  # too deep to be written again?
            return [*(starts if isinstance(starts, list) else []), before]
    return []


def open_run_folder(
    path: Path,
    plan: Plan,
    dataset: Dataset,
    *,
    resume: str = "auto",
    init_from: Path | None = None,
    world: World | None = None,
    asked: Config | None = None,
) -> RunFolder:
    """The folder of `plan`'s run, created, or rewound to the checkpoint it continues from.

    Collective: the main process of `world` does it, and tells the others.

    `resume` is `auto` (continue a run of the same configuration, else start), `never` (only
    start), `must` (only continue), `extend` (only continue, with the schedule that `plan_run` has
    begun anew) or the path of a checkpoint to branch off from. A run that starts begins with the
    weights of the model `init_from`. `asked` is the configuration as the user has it, for messages.
    The caller holds the folder's lock.
    Raises ConfigError when the folder holds another run, or one on other data, saying what
    differs; nothing has been touched then. And when a process does not see the folder, since each
    is to write its part of the checkpoints there.
    """
    world = world or World()

    def open_it() -> tuple[RunFolder, bool]:
        folder = _open(path, plan, dataset, resume, init_from, asked or plan.config)
        return replace(folder, initial_weights=None), folder.initial_weights is not None

    folder, is_begun_from_weights = world.on_main(open_it)
    _check_shared(folder, world)
    if not is_begun_from_weights:
        return folder
    assert init_from is not None  # where they came from
    weights = initial_weights(init_from, plan.config, dataset.tokenizer)
    return replace(folder, initial_weights=weights)


def _check_shared(folder: RunFolder, world: World) -> None:
    """Refuse a folder that lies on one of several machines alone, now and not at the first save."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not (is_there := _holds(folder.path, folder.run_id)) and time.monotonic() < deadline:
        time.sleep(0.1)
    where = None if is_there else f"rank {world.rank} on {socket.gethostname()}"
    without = [place for place in world.collect(where) if place is not None]
    if without:
        raise ConfigError(
            f"--run-dir {folder.path}, which rank 0 has opened, is not there for "
            f"{', '.join(without)}: every process writes its part of a checkpoint, so choose a "
            "folder on a file system that all machines share"
        )


def _holds(path: Path, run_id: str) -> bool:
    try:
        identity = read_identity(path)
    except (CorruptError, OSError):  # half of it can be seen yet
        return False
    return identity is not None and identity["run_id"] == run_id


def _open(
    path: Path, plan: Plan, dataset: Dataset, resume: str, init_from: Path | None, asked: Config
) -> RunFolder:
    """As `open_run_folder`, in the main process. First all that may be refused, then changes."""
    given = None if resume in RESUME_WORDS else _open_given(resume, init_from)
    weights = None
    identity = read_identity(path)
    refuse_foreign(path, identity)
    if identity is not None and not step_folders(path) and resume == "auto":
        identity = None  # it failed before its first checkpoint: there is nothing to continue
    if identity is None:
        if resume in ("must", "extend"):
            raise no_checkpoint(path, resume)
        identity = {"run_id": uuid.uuid4().hex, "parent": _parent(given), "init_from": None}
    else:
        _check_continues(path, identity, resume, _parent(given), init_from)
    run_id = str(identity["run_id"])
    store = CheckpointStore(
        path / "checkpoints", run_id=run_id, config_hash=config_hash(plan.config)
    )
    checkpoint = store.latest()
    if checkpoint is None:
        if resume in ("must", "extend"):
            raise no_checkpoint(path, resume)
        checkpoint = given
        if init_from is not None:  # also for a run that died in its first save
            weights = initial_weights(init_from, plan.config, dataset.tokenizer)
            identity["init_from"] = weights.origin
    else:
        _check_data(path, checkpoint, dataset.hash)
        check_same_run(path, checkpoint, plan, asked)
    check_start_step(path, plan, checkpoint)
    record = None if checkpoint is None else saved_state(checkpoint)[1]
    store.clean()
    _remove_unfinished(path)
    is_new = checkpoint is None or checkpoint is given
    _write_identity(path, plan, identity, store.warnings, is_new=is_new)
    folder = RunFolder(path, run_id, store, checkpoint, weights)
    _rewind(folder, record)
    return folder


def _check_continues(
    path: Path,
    identity: Mapping[str, Any],
    resume: str,
    parent: Mapping[str, Any] | None,
    init_from: Path | None,
) -> None:
    """Raise ConfigError unless the run in `path` is to go on, and began as it is asked for."""
    if resume == "never":
        raise ConfigError(
            f"--resume never: {path} already holds a run; give another --run-dir or --name, "
            "or remove the folder"
        )
    if parent is not None and identity.get("parent") != parent:
        raise ConfigError(
            f"--resume {resume}: {path} already holds a run that did not start from that "
            "checkpoint; give another --run-dir to branch off from it"
        )
    check_origin(identity["init_from"], init_from, path)


def _open_given(resume: str, init_from: Path | None) -> Checkpoint:
    """The checkpoint that the user named, or what else could have been meant."""
    if init_from is not None:
        raise ConfigError(
            f"--resume {resume} and --init-from {init_from} both say where the weights come from; "
            "keep one"
        )
    path = Path(resume)
    if (path / "checkpoints").is_dir():
        names = ", ".join(sorted(p.name for p in (path / "checkpoints").glob("step-*")))
        raise ConfigError(
            f"--resume {resume} is a run folder; name one of its checkpoints: {names or 'none yet'}"
        )
    if not path.is_dir():
        raise ConfigError(
            f"--resume {resume} is neither a checkpoint folder nor one of: "
            + ", ".join(RESUME_WORDS)
        )
    checkpoint = open_checkpoint(path)
    if "optimizer" not in checkpoint.manifest.groups:
        raise ConfigError(
            f"--resume {resume} holds a model alone, without the state of a run; begin one with "
            f"its weights: --init-from {resume}"
        )
    return checkpoint


def _parent(given: Checkpoint | None) -> dict[str, Any] | None:
    return None if given is None else {"run_id": given.run_id, "step": given.step}


def _check_data(path: Path, checkpoint: Checkpoint, data_hash: str) -> None:
    """Refuse to go on with other text than the run began with."""
    saved = saved_state(checkpoint)[1].data_hash
    if saved not in (None, data_hash):
        raise ConfigError(
            f"the data has changed since step {checkpoint.step} of {path} was saved "
            f"(sha256 {saved[:16]}…, now {data_hash[:16]}…); restore it, or start "
            "anew with another --run-dir or --name"
        )


def _write_identity(
    path: Path, plan: Plan, identity: Mapping[str, Any], warnings: list[str], *, is_new: bool
) -> None:
    """Write plan.json and config.toml; the latter last, since its presence makes it a run.

    A run may go on while its disk is full: a file that says the same already stays, and so does,
    with a line in `warnings`, the Plan of an earlier start, which names the same run.
    """
    for name in ("samples", "checkpoints"):
        make_folder(path / name)
    record = json.dumps({**identity, **plan.to_json()}, indent=2) + "\n"
    files = {"plan.json": record, "config.toml": to_toml(plan.portable_config)}
    for name, text in files.items():
        before = None
        with suppress(OSError):
            before = (path / name).read_bytes()
        if before == text.encode():
            continue
        try:
            write_atomic(path / name, text.encode())
        except StorageError as error:
            if is_new or name != "plan.json":
                raise
            warnings.append(f"{error}. It stays that of an earlier start")


def _remove_unfinished(path: Path) -> None:
    """Remove what a kill left of files that were being replaced."""
    for folder in (path, path / "samples"):
        for left in folder.glob("*.tmp-*"):
            if is_temporary(left.name) and (left.is_file() or left.is_symlink()):
                with storage_errors(left, "remove"):
                    left.unlink()


def _rewind(folder: RunFolder, record: RunRecord | None) -> None:
    """Make the logs end where the checkpoint was saved; without one of its own they start again."""
    checkpoint = folder.checkpoint
    if checkpoint is None or not checkpoint.path.is_relative_to(folder.path.resolve()):
        last_step, record, event = -1, None, None
    else:
        last_step = checkpoint.step
        event = checkpoint_event(
            checkpoint.step, checkpoint.path, checkpoint.manifest.n_bytes, None
        )
    record = record or RunRecord(metrics_bytes=0, log_bytes=0)
    rewind_metrics(
        folder.metrics_path,
        n_bytes=record.metrics_bytes,
        unwritten=record.metrics_unwritten,
        checkpoint=event,
    )
    with storage_errors(folder.log_path, "write"), suppress(FileNotFoundError):
        if folder.log_path.stat().st_size > record.log_bytes:
            os.truncate(folder.log_path, record.log_bytes)
    for sample in (folder.path / "samples").glob("step-*.txt"):
        if sample.stem[5:].isdigit() and int(sample.stem[5:]) > last_step:
            sample.unlink()
    if last_step < 0:  # a resumed run adds to them: they may say why it had to be resumed
        rmtree(folder.path / RANK_LOGS, ignore_errors=True)
