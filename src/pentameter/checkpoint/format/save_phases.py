"""The four phases in which a checkpoint is saved: plan, snapshot, write, commit.

1. *Plan* decides which rank writes which regions, and checks for free space. Collective; no
   message grows with the number of tensors.
2. *Snapshot* copies the bytes for this rank's files to the host. Without it, files are written
   from the tensors themselves, which must then stay unchanged until the write is done.
3. *Write* writes, syncs and reads back each file. It sends no messages, so a thread can do it.
4. *Commit* adds the manifest and renames the folder, once all ranks have written. Collective.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.folders.opening import STATE_NAME
from pentameter.checkpoint.format.manifest import MANIFEST_NAME, encode_json, is_plain_name
from pentameter.checkpoint.format.owners import (
    Groups,
    Holdings,
    Ranks,
    Region,
    exchange,
    file_name,
    files_of,
    holdings,
    owned,
    views_agree,
)
from pentameter.checkpoint.format.safetensors_format import TensorFile, plan_file
from pentameter.disk.atomic import FileRecord, sync, write_verified
from pentameter.errors import StorageError
from pentameter.processes.group.world import World

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

NamedFiles = Mapping[str, tuple[str, TensorFile]]
"""Group (`model`, `optimizer`) → (file name, content) of the file that this rank writes for it. A
group is absent if this rank writes nothing for it."""


@dataclass(frozen=True)
class Contents:
    """The content of one checkpoint: its `step`, the tensors, the run's state and further small
    files."""

    step: int
    tensors: Groups
    """Groups (`model`, `optimizer`) of named tensors, as far as this rank has them; each is written
    to `GROUP.safetensors`."""
    state: Mapping[str, Any]
    """The content of state.json, JSON without NaN."""
    extra_files: Mapping[str, bytes]
    """Name → content of further small files."""
    layout: Mapping[str, int] = field(default_factory=dict)
    """Dimension of the layout → degree of parallelism, for the manifest."""

    def small_files(self) -> dict[str, bytes]:
        """Return name → content for the files next to the tensors. Raises ValueError for a state
        that JSON cannot hold, and for a file or tensor group whose name is taken or leads out of
        the folder."""
        taken = {MANIFEST_NAME, STATE_NAME, *(f"{group}.safetensors" for group in self.tensors)}
        for name in [*self.extra_files, *self.tensors]:
            if not is_plain_name(name) or name in taken:
                raise ValueError(f"a checkpoint cannot hold a file or group named {name!r}")
        return {STATE_NAME: encode_json(dict(self.state)), **self.extra_files}


@dataclass
class Exchanged:
    """Cache for saves in layouts where it does not follow from the placements which rank holds
    what, so that ranks must send each other lists of their regions. The lists are used again in
    later saves while every rank's regions stay the same."""

    fingerprints: Sequence[bytes] = ()
    """`Holdings.fingerprint` for each rank in order, from the exchange."""
    ranks_of: Mapping[Region, Ranks] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """Records (name, size, sha256) of the files that one rank has written and read back."""

    tensors: Mapping[str, FileRecord]
    """Tensor group → record of this rank's file."""
    small: Sequence[FileRecord]


class HostBuffers:
    """Host memory for snapshots: one buffer per group, reused from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(
        self, files: Mapping[str, tuple[str, TensorFile]]
    ) -> dict[str, tuple[str, TensorFile]]:
        """Copy the files' tensors into these buffers. Return group → (file name, content), with the
        contents in the buffers. Overwrites the previous copies, and waits for copies from GPUs."""
        import torch

        copied = {}
        for group, (name, file) in files.items():
            buffer = self._buffers.get(group)
            if buffer is None or buffer.numel() != file.n_data_bytes:
                self._buffers.pop(group, None)  # free it before the next takes as much
                buffer = _host_buffer(file.n_data_bytes, pinned=bool(file.gpus))
                self._buffers[group] = buffer
            copied[group] = name, file.copied_to(buffer)
        for device in set[torch.device]().union(*(file.gpus for _, file in files.values())):
            torch.cuda.synchronize(device)  # copies into pinned memory are only started
        return copied


def _host_buffer(n_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate host memory, uint8 (n_bytes,), page-locked if `pinned`, else on large pages if the
    system has them: the first copy touches every page while training waits, and large pages cut
    that time to a fifth."""
    import torch

    if pinned or not n_bytes:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pinned)
    # Private, as memory that processes share has its own setting for large pages, mostly off.
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # another system, or a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass
class Save:
    """One rank's save of a checkpoint, from `plan` to `commit`: the files to write, and the thread
    that writes them. `started_at` is the time of the plan in seconds, from time.perf_counter();
    `layout` goes into the manifest."""

    step: int
    folder: Path
    """The temporary folder, renamed at commit."""
    groups: Sequence[str]
    files: NamedFiles
    small: Mapping[str, bytes]
    """Name → content of the other files, which the main process writes."""
    world: World
    layout: Mapping[str, int]
    started_at: float
    _written: Written | None = None
    _error: BaseException | None = None
    _thread: Thread | None = None

    def start_writing(self, buffers: HostBuffers) -> None:
        """Copy the tensors into `buffers`, so that they may change from now on, and start a thread
        that writes the files. `written` waits for it.

        If memory for the snapshot is lacking, it is `written` that raises StorageError, not this
        method: until then, ranks with and without the memory proceed alike.
        """
        try:
            self.files = buffers.copy(self.files)
        except (RuntimeError, MemoryError, OSError) as error:  # torch's text is long
            n_bytes = sum(file.n_data_bytes for _, file in self.files.values())
            self._error = StorageError(
                f"cannot copy {n_bytes:,} bytes in memory to write them to {self.folder.parent} "
                f"beside training: {str(error).splitlines()[0]}; set checkpoint.asynchronous=false"
            )
        self._thread = Thread(target=self._write, name=f"save of step {self.step}", daemon=True)
        self._thread.start()

    @property
    def is_beside(self) -> bool:
        """True if the files are, or were, written by a thread while training goes on; False if
        training waits for them."""
        return self._thread is not None

    @property
    def is_writing(self) -> bool:
        """True while this rank's thread is still writing."""
        return self._thread is not None and self._thread.is_alive()

    def written(self) -> Written:
        """Return the records of this rank's files once all are on disk. Waits for the thread that
        writes them; if none was started, writes them now. Raises the error that stopped the
        write."""
        if self._thread is None:
            self._write()
        else:
            self._thread.join()
        self.files = {}  # so that no tensor is held longer
        if self._error is not None:
            raise self._error
        assert self._written is not None
        return self._written

    def _write(self) -> None:
        if self._error is not None:
            return
        try:
            tensors = {
                group: write_verified(self.folder / name, file.chunks())
                for group, (name, file) in self.files.items()
            }
            small = []
            if self.world.is_main:
                small = [write_verified(self.folder / n, [data]) for n, data in self.small.items()]
            elif tensors:
                sync(self.folder)  # this rank may be on another machine than the main process
            self._written = Written(tensors, small)
        except BaseException as error:
            self._error = error


def plan_files(
    groups: Groups, world: World, meshes: Sequence[DeviceMesh], exchanged: Exchanged
) -> tuple[NamedFiles, int]:
    """Plan the files that this rank writes: return group → (file name, content), and the number of
    bytes that all ranks together write.

    Collective: each rank passes the same groups with the tensors it has, and the `meshes` of the
    layout that placed them. `exchanged` is used, and updated, if placements do not determine the
    owners. Raises ValueError if the ranks together do not hold a whole tensor, TypeError for a
    tensor that cannot be saved; an error on one rank is raised on all.
    """
    found: dict[str, Any] = {}

    def by_placement() -> tuple[bytes, bytes, dict[str, int]]:
        holds = found["holds"] = holdings(groups, meshes)
        ranks_of = holds.ranks_of if world.size > 1 else dict.fromkeys(holds.tensors, (0,))
        files = found["files"] = files_of(owned(ranks_of, world.rank), holds)
        return holds.view, holds.fingerprint, _sizes(files)

    by_rank = world.gathered(by_placement)
    views, fingerprints = [view for view, _, _ in by_rank], [each for _, each, _ in by_rank]
    sizes: Sequence[Mapping[str, int]] = [each for _, _, each in by_rank]
    files: dict[str, TensorFile] = found["files"]
    if world.size > 1 and not views_agree(views, meshes):
        files, sizes = _files_by_exchange(found["holds"], fingerprints, world, exchanged)
    named = {}
    for group in groups:
        writers = [rank for rank, of_rank in enumerate(sizes) if group in of_rank]
        if not writers and world.is_main:  # the main process writes a group without tensors
            named[group] = file_name(group, [world.rank], world.rank), plan_file({})
        elif world.rank in writers:
            named[group] = file_name(group, writers, world.rank), files[group]
    return named, sum(sum(of_rank.values()) for of_rank in sizes)


def _files_by_exchange(
    holds: Holdings, fingerprints: Sequence[bytes], world: World, exchanged: Exchanged
) -> tuple[dict[str, TensorFile], Sequence[Mapping[str, int]]]:
    """Plan this rank's files when placements do not determine which ranks hold a tensor. Return
    them, group (`model`, `optimizer`) → TensorFile, and each rank's bytes by group. Collective.

    The ranks exchange their lists of regions and keep them in `exchanged`. Nothing is exchanged if
    `fingerprints` (a hash of each rank's list) are those of the last exchange.
    """
    if exchanged.fingerprints != fingerprints:
        exchanged.ranks_of = exchange(holds.tensors, world)
        exchanged.fingerprints = fingerprints
    own = owned(exchanged.ranks_of, world.rank)
    files: dict[str, TensorFile] = {}

    def plan() -> dict[str, int]:
        files.update(files_of(own, holds))
        return _sizes(files)

    return files, world.gathered(plan)


def _sizes(files: Mapping[str, TensorFile]) -> dict[str, int]:
    return {group: file.n_bytes for group, file in files.items()}
