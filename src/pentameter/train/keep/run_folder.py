"""The run folder, created for a new run or rewound to the checkpoint from which a run resumes."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from pentameter.checkpoint.folders.opening import Check, Checkpoint, check_sizes, open_checkpoint
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.folders.verification import VISIBLE_SECONDS, Verification
from pentameter.checkpoint.state.initial_weights import (
    InitialWeights,
    check_origin,
    initial_weights,
)
from pentameter.config.files.write import to_toml
from pentameter.config.fingerprint import config_hash
from pentameter.data.shards.dataset import Dataset
from pentameter.data.shards.token_stream import tokens_for
from pentameter.disk.atomic import (
    MAX_JSON_BYTES,
    is_temporary,
    make_folder,
    read_own_json,
    read_regular,
    remove_tree,
    storage_errors,
    write_atomic,
)
from pentameter.disk.held_folder import HeldFolder
from pentameter.disk.lock import Fence
from pentameter.errors import ConfigError, CorruptError, StorageError
from pentameter.estimating.bytes.plan_estimates import plan_record
from pentameter.planning.plan import Plan
from pentameter.processes.failures.activity import STARTING
from pentameter.processes.group.world import World
from pentameter.record.checkpoints import step_folder_name
from pentameter.record.events import CheckpointMetrics
from pentameter.record.identity import RunIdentity, read_identity
from pentameter.record.log_files import Reached, rewind_metrics
from pentameter.train.keep.resuming import (
    RunRequest,
    check_same_run,
    check_start_step,
    newest_of_same_steps,
    no_checkpoint,
    refuse_foreign,
    step_folders,
)
from pentameter.train.state import SavedRun, saved_state

RESUME_WORDS = ("auto", "never", "must", "extend")
RANK_LOGS = "logs"
APPENDED_FILES = ("log.txt", "metrics.jsonl")
"""Files that are appended to in place; any other is replaced as a whole, so that a symlink at its
name is harmless."""
WRITTEN_FOLDERS = ("checkpoints", "samples", RANK_LOGS, "profile", "tensorboard", "wandb", "nodes")


@dataclass(frozen=True)
class RunFolder:
    """An open run folder: its `path`, the run's id, and the `store` that saves its checkpoints.
    `checkpoint` is the one to resume from; None for a new run."""

    path: Path
    run_id: str
    store: CheckpointStore
    checkpoint: Checkpoint | None
    initial_weights: InitialWeights | None = None
    """Another model's weights, for a new run that begins with them; else None."""
    base_model: str | None = None
    """The Hugging Face name of the model that the run began with; None if it began with none of
    these."""
    reached: Reached | None = None
    """The last step that an earlier start recorded, and when. None for a new run, and if no event
    has a time."""
    own_keys: bool = True
    """Whether random keys for drawing batch rows differ between the data sets of a mixture. False
    only for a run that an earlier version began, which keeps its old order."""
    opened: HeldFolder | None = None
    """The folder, held open by this rank, to notice if another one takes its place."""
    fence: Fence | None = None
    """Tells whether rank 0's process still holds the folder's lock."""

    @property
    def holds_checkpoint(self) -> bool:
        """True if `checkpoint` is in this folder. False if there is none, or if the run branches
        off from one elsewhere, even in a folder below this one."""
        found = self.checkpoint
        return found is not None and found.path.parent == self.path.resolve() / "checkpoints"

    def check_there(self) -> None:
        """Raise StorageError unless `path` still leads to this run's folder."""
        if self.opened is not None:
            self.opened.check(lambda: _holds(self.path, self.run_id))

    def check_ours(self) -> None:
        """Call before anything is written into the folder. Raises StorageError unless `path` still
        leads to this run's folder, RunFolderInUseError if another process has taken it over."""
        self.check_there()
        if self.fence is not None:
            self.fence.check()

    def check_not_taken(self) -> None:
        """Make the same check as `check_ours` after the run has released its lock, when no process
        need hold it."""
        replace(self, fence=self.fence and replace(self.fence, is_owner=False)).check_ours()

    def check_not_replaced(self) -> None:
        """Raise RunFolderInUseError if another process has taken the folder over. A folder that is
        missing at the moment is no error: its disk may come back."""
        with suppress(StorageError):
            self.check_ours()

    def log_path_of(self, rank: int) -> Path:
        """Return the path of a rank's log: log.txt for rank 0, else logs/rank-00001.txt, for
        example."""
        return self.path / RANK_LOGS / f"rank-{rank:05d}.txt" if rank else self.log_path

    @property
    def metrics_path(self) -> Path:
        """The path of metrics.jsonl."""
        return self.path / "metrics.jsonl"

    @property
    def log_path(self) -> Path:
        """The path of log.txt, rank 0's copy of the console's text."""
        return self.path / "log.txt"

    def write_sample(self, step: int, text: str) -> None:
        """Write a text sampled at `step` to samples/step-….txt. Raises StorageError."""
        self.check_ours()
        path = self.path / "samples" / f"{step_folder_name(step)}.txt"
        make_folder(path.parent)
        write_atomic(path, text.encode("utf-8"))

    def write_environment(self, environment: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Write environment.json: `environment` (versions and devices) of this start, after those
        of earlier starts. Return that of the start before; None if there was none. Raises
        StorageError."""
        self.check_ours()
        path = self.path / "environment.json"
        earlier = _earlier_starts(path)
        record = {**environment, "earlier_starts": earlier}
        write_atomic(path, json.dumps(record, indent=2).encode() + b"\n")
        return earlier[-1] if earlier else None


def _earlier_starts(path: Path) -> list[Any]:
    """Return the starts recorded in environment.json, oldest first; an empty list if it is missing
    or damaged, since only people read it."""
    with suppress(CorruptError, StorageError, RecursionError):
        before = read_own_json(path)
        starts = before.pop("earlier_starts", [])
        json.dumps([starts, before], indent=2)  # too deep to be written again?
        return [*(starts if isinstance(starts, list) else []), before]
    return []


def open_run_folder(
    request: RunRequest, plan: Plan, dataset: Dataset, fence: Fence | None = None
) -> RunFolder:
    """Create the run folder, or rewind it to the checkpoint to resume from, and return it open.
    Collective: rank 0 does it and broadcasts the result; all ranks help to hash what is verified.
    The caller holds the folder's lock; from then on its `fence` is asked before each write.

    Raises ConfigError, with the differences, if the folder holds another run or one on other data,
    before anything is changed. Also raises ConfigError if a rank does not see the folder, since
    each rank writes its shards of a checkpoint there.
    """
    world, verification = request.world, request.verification
    folder, begins_with = verification.on_main(
        lambda: _open(request, plan, dataset, fence), STARTING
    )
    _check_other_writers(folder, world)
    folder = replace(
        folder,
        store=folder.store.with_verification(verification),
        opened=HeldFolder.at(folder.path),
        fence=fence and replace(fence, is_owner=world.is_main),
    )
    if begins_with is None:
        return folder
    assert request.init_from is not None  # the path that the weights come from
    weights = initial_weights(begins_with, plan.config, dataset.tokenizer, check_sizes)
    return replace(folder, initial_weights=replace(weights, path=request.init_from))


def hash_of_read(dataset: Dataset, plan: Plan, step: int) -> str:
    """Return the sha256, in hex, of all tokens that the first `step` steps may have read."""
    return dataset.hash_of(tokens_for(step * plan.batch_size, plan.config.model.context_length))


def _check_other_writers(folder: RunFolder, world: World) -> None:
    """Raise ConfigError on all ranks if one does not see rank 0's folder within VISIBLE_SECONDS,
    and so could not save into it. Collective."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not (is_there := _holds(folder.path, folder.run_id)) and time.monotonic() < deadline:
        time.sleep(0.1)
    unseen_by = None if is_there else f"rank {world.rank} on {socket.gethostname()}"
    without = [each for each in world.all_gather(unseen_by) if each is not None]
    if without:
        raise ConfigError(
            f"--run-dir {folder.path}, which rank 0 has opened, is not there for "
            f"{', '.join(without)}: every process writes its part of a checkpoint, so choose a "
            "folder on a file system that all machines share"
        )


def _holds(path: Path, run_id: str) -> bool:
    try:
        identity = read_identity(path)
    except (CorruptError, OSError):  # a network file system may show half of it yet
        return False
    return identity is not None and identity.run_id == run_id


def refuse_symlinks(path: Path) -> None:
    """Raise ConfigError if a name that training writes to in the run folder `path` is a
    symlink, or not a regular file. The folder itself may be a symlink."""
    for name in (*APPENDED_FILES, *WRITTEN_FOLDERS):
        entry = path / name
        if entry.is_symlink():
            raise ConfigError(
                f"{entry} is a symbolic link to {os.readlink(entry)}, and training writes into its "
                "run folder alone; remove the link. To keep a run on another disk, put all of it "
                f"there (--run-dir /disk/NAME; {path} may be a link to that folder), or mount a "
                f"folder of that disk at {entry} (mount --bind)"
            )
        if name in APPENDED_FILES and entry.exists() and not entry.is_file():
            raise ConfigError(f"{entry} is a folder, a pipe or a device, and no file; remove it")


def _open(
    request: RunRequest, plan: Plan, dataset: Dataset, fence: Fence | None
) -> tuple[RunFolder, Path | None]:
    """Create or rewind the folder on rank 0. All checks that may refuse it come before any change.
    Return the open folder, and the path of the model whose weights a new run begins with; None if
    it begins without one, or resumes."""
    path, resume, init_from = request.run_dir, request.resume, request.init_from
    check, begins_with = request.verification.check, None
    refuse_symlinks(path)
    given = None if resume in RESUME_WORDS else _open_given(resume, init_from, check)
    identity = read_identity(path)
    refuse_foreign(path, identity)
    if identity is not None and not step_folders(path) and resume == "auto":
        identity = None  # it failed before its first checkpoint: there is nothing to resume
    parent = None if given is None else {"run_id": given.manifest.run_id, "step": given.step}
    if identity is None:
        identity = RunIdentity(uuid.uuid4().hex, parent)
    else:
        _check_resumes(request, identity, parent)
    run_id = identity.run_id
    store = CheckpointStore(
        path / "checkpoints",
        run_id=run_id,
        config_hash=config_hash(plan.config),
        verification=request.verification,
        fence=fence,
    )
    checkpoint = store.latest()
    if checkpoint is None:
        if resume in ("must", "extend"):
            raise no_checkpoint(request)
        checkpoint = given
        if init_from is not None:  # also for a run that died in its first save
            weights = initial_weights(init_from, plan.config, dataset.tokenizer, check)
            identity = replace(identity, init_from=weights.origin)
            # The other ranks take this one, whatever the run there saves meanwhile.
            begins_with = init_from if weights.stored.checkpoint is None else weights.stored.path
    else:
        if request.goes_on:
            checkpoint = newest_of_same_steps(store, checkpoint, plan)
        _check_data(path, dataset, plan, checkpoint)
        check_same_run(path, checkpoint, plan, request.config)
    check_start_step(path, plan, checkpoint)
    record = None if checkpoint is None else saved_state(checkpoint)[1]
    if checkpoint is not None and request.goes_on:
        store.discard_after(checkpoint.step)
    store.clean()
    _remove_unfinished(path, store.warnings)
    is_new = checkpoint is None or checkpoint is given
    own_keys = record is None or record.own_keys
    data = {
        "hash": dataset.hash,
        "shards": [str(folder) for folder in dataset.folders],
        "batches": request.supplied.record(plan)["batches"],
        "own_keys": own_keys,
    }
    _write_identity(path, plan, {**asdict(identity), "data": data}, store.warnings, is_new=is_new)
    base_model = (identity.init_from or {}).get("base_model")
    own_store = store.with_verification(Verification())
    folder = RunFolder(
        path, run_id, own_store, checkpoint, None, base_model, own_keys=own_keys, fence=fence
    )
    return replace(folder, reached=_rewind(folder, record)), begins_with


def _check_data(path: Path, dataset: Dataset, plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if the tokens that the run in `path` has read up to `checkpoint` have
    changed."""
    data_hash = saved_state(checkpoint)[1].data_hash
    now = hash_of_read(dataset, plan, checkpoint.step)
    if data_hash not in (None, now):
        raise ConfigError(
            f"the data has changed since step {checkpoint.step} of {path} was saved "
            f"(sha256 {data_hash[:16]}…, now {now[:16]}…), or an earlier version split it "
            "otherwise (CHANGELOG.md); restore it, or start anew with another --run-dir or "
            "--name"
        )


def _check_resumes(
    request: RunRequest, identity: RunIdentity, parent: Mapping[str, Any] | None
) -> None:
    """Raise ConfigError if the run in the folder, given by `identity`, may not resume: `--resume
    never` was given, it began from other weights, or it branched off from another checkpoint than
    `parent` (None: from no checkpoint)."""
    path = request.run_dir
    if request.resume == "never":
        raise ConfigError(
            f"--resume never: {path} already holds a run; give another --run-dir or --name, "
            "or remove the folder"
        )
    if parent is not None and identity.parent != parent:
        raise ConfigError(
            f"--resume {request.resume}: {path} already holds a run that did not start from that "
            "checkpoint; give another --run-dir to branch off from it"
        )
    check_origin(identity.init_from, request.init_from, path, request.verification.check)


def _open_given(resume: str, init_from: Path | None, check: Check) -> Checkpoint:
    """Open the checkpoint at the path `resume`, verified by `check`. Raises ConfigError, with
    suggestions, if it is not a checkpoint of a run, or if `init_from` also names weights."""
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
    checkpoint = open_checkpoint(path, check)
    if "optimizer" not in checkpoint.manifest.groups:
        raise ConfigError(
            f"--resume {resume} holds a model alone, without the state of a run; begin one with "
            f"its weights: --init-from {resume}"
        )
    return checkpoint


def _write_identity(
    path: Path, plan: Plan, identity: Mapping[str, Any], warnings: list[str], *, is_new: bool
) -> None:
    """Write plan.json (with `identity`), then config.toml, whose presence marks a run folder. A
    file that already has the same content is left alone.

    A run may resume while its disk is full: if plan.json cannot be written and `is_new` is False,
    an earlier start's plan.json, which names the same run, is kept, and a line is added to
    `warnings`. Every other failed write raises StorageError.
    """
    for name in ("samples", "checkpoints"):
        make_folder(path / name)
    record = json.dumps({**identity, **plan_record(plan)}, indent=2) + "\n"
    files = {"plan.json": record, "config.toml": to_toml(plan.portable_config)}
    for name, text in files.items():
        before = None
        with suppress(CorruptError, StorageError):
            before = read_regular(path / name, max_bytes=MAX_JSON_BYTES)
        if before == text.encode():
            continue
        try:
            write_atomic(path / name, text.encode())
        except StorageError as error:
            if is_new or name != "plan.json":
                raise
            warnings.append(f"{error}. It stays that of an earlier start")


def _remove_unfinished(path: Path, warnings: list[str]) -> None:
    """Remove temporary files that a killed process left in the run folder `path` and its samples.
    Nobody reads them, so one that cannot be removed only adds to `warnings`."""
    for folder in (path, path / "samples"):
        for left in folder.glob("*.tmp-*"):
            if is_temporary(left.name) and (left.is_file() or left.is_symlink()):
                try:
                    remove_tree(left)
                except StorageError as error:
                    warnings.append(f"what is left of a file stays: {error}")


def _rewind(folder: RunFolder, record: SavedRun | None) -> Reached | None:
    """Set the run folder back to its checkpoint: truncate the logs to the sizes that `record` has
    of them, and remove samples of later steps. If the folder has no checkpoint, empty the logs and
    remove those of other ranks. Return the last step that was recorded before this, and when, or
    None without a checkpoint."""
    checkpoint = folder.checkpoint
    if checkpoint is None or not folder.holds_checkpoint:
        last_step, record, event = -1, None, None
    else:
        last_step = checkpoint.step
        event = CheckpointMetrics(checkpoint.step, checkpoint.path, checkpoint.manifest.n_bytes)
    record = record or SavedRun()
    reached = rewind_metrics(
        folder.metrics_path,
        n_bytes=record.metrics_bytes,
        unwritten=record.metrics_unwritten,
        checkpoint=event,
    )
    with storage_errors(folder.log_path, "write"), suppress(FileNotFoundError):
        if folder.log_path.stat().st_size > record.log_bytes:
            os.truncate(folder.log_path, record.log_bytes)
    for sample in (folder.path / "samples").glob("step-*.txt"):
        if sample.stem[5:].isdecimal() and int(sample.stem[5:]) > last_step:
            with storage_errors(sample, "remove"):
                sample.unlink()
    if last_step < 0:  # a resumed run adds to them: they may say why it had to be resumed
        rmtree(folder.path / RANK_LOGS, ignore_errors=True)
        return None
    return reached
