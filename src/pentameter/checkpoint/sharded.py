"""Saving and reading by many processes, planned by `torch.distributed.checkpoint`.

Its planners decide who writes which piece (each once, whoever else holds a copy; the work shared
out evenly) and which pieces fill a tensor of another layout. Storage is ours. Torch's own
HuggingFaceStorageWriter neither hashes nor syncs what it writes, nor knows of a commit: here the
main process prepares the folder while plans are made, each process streams its files through
`write_verified`, and the main process commits what all have finished.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pentameter.checkpoint.pieces import Piece, piece_key
from pentameter.checkpoint.stored_tensors import StoredTensors
from pentameter.checkpoint.tensors import LazyTensor, TensorFile, materialize, plan_file
from pentameter.disk.atomic import FileRecord, sync_folder, write_verified
from pentameter.errors import PentameterError
from pentameter.parallel.local_parts import local_part

_ENTRY_BYTES = 400  # what a header says of one piece, generously

Begin = Callable[[int], Path]
"""Make room for a number of bytes: the folder to write into. The main process calls it."""
Commit = Callable[[Mapping[str, Sequence[FileRecord]]], None]
"""Finish with the files of each group. The main process calls it, when all have written."""


def save_sharded(
    groups: Mapping[str, Mapping[str, torch.Tensor | LazyTensor]], begin: Begin, commit: Commit
) -> None:
    """Write what is here of each group's tensors, as all processes of the run do at once.

    A plain tensor that several processes pass is the same in all of them. What fails in one
    process is raised in each.
    """
    named = {
        (group, name): materialize(tensor)
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }
    with _same_failure_everywhere():
        dcp.save(
            {f"{group}/{name}": tensor for (group, name), tensor in named.items()},
            storage_writer=_Writer(tuple(groups), begin, commit),
            planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )


def load_sharded(
    stored: StoredTensors, targets: Mapping[str, torch.Tensor], *, no_dist: bool
) -> None:
    """Fill this process's parts of the targets; `no_dist` where it is the only one.

    Names, shapes and dtypes must be those stored. What fails in one process is raised in each.
    """
    with _same_failure_everywhere(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(
            dict(targets),
            storage_reader=_Reader(stored),
            planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=no_dist,
        )


@contextmanager
def _same_failure_everywhere() -> Iterator[None]:
    """Raise the failure itself: ours before any other, that of the lowest rank among equals."""
    try:
        yield
    except CheckpointException as error:
        failures = [failure for _, (failure, _) in sorted(error.failures.items())]
        ours = [failure for failure in failures if isinstance(failure, PentameterError)]
        raise (ours or failures)[0] from None


class _SavePlanner(DefaultSavePlanner):
    """Torch's planner, but for where a process's pieces lie, which `local_part` knows better."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, tensor in self.state_dict.items():
            local, offset = local_part(tensor)
            if tensor.numel() and not local.numel():
                continue  # an uneven division leaves the last processes with nothing
            chunk = ChunkStorageMetadata(torch.Size(offset), local.shape)
            properties = TensorProperties(dtype=tensor.dtype)
            data = TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape)
            items.append(
                WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD, tensor_data=data)
            )
        self.plan = SavePlan(items)
        return self.plan


@dataclasses.dataclass(frozen=True)
class _Files:
    """What a process is to write: the folder, and group → file name."""

    folder: Path
    names: Mapping[str, str]


class _Writer(StorageWriter):
    """Writes the pieces of a plan, one file per process and group, hashed and synced."""

    def __init__(self, groups: Sequence[str], begin: Begin, commit: Commit) -> None:
        self._groups = groups
        self._begin = begin
        self._commit = commit

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from save to save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is made once it is known how much is to be written."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """In the main process: make the folder, and give each process its files' names."""
        folder = self._begin(sum(_n_bytes(item) for plan in plans for item in plan.items))
        names: list[dict[str, str]] = [{} for _ in plans]
        for group in self._groups:
            writers = [rank for rank, plan in enumerate(plans) if _of_group(group, plan)] or [0]
            for number, rank in enumerate(writers):
                names[rank][group] = file_name(group, number, len(writers))
        return [
            dataclasses.replace(plan, storage_data=_Files(folder, own))
            for plan, own in zip(plans, names, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        files: _Files = plan.storage_data
        results = []
        for group, name in files.names.items():
            file = _plan_pieces(_of_group(group, plan), planner)
            record = write_verified(files.folder / name, file.chunks())
            results.append(WriteResult(MetadataIndex(group), record.n_bytes, record))
        if results:
            sync_folder(files.folder)  # on another machine than the main process's, perhaps
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """In the main process, when all have written: commit."""
        records: dict[str, list[FileRecord]] = {group: [] for group in self._groups}
        for result in (result for of_rank in results for result in of_rank):
            records[result.index.fqn].append(result.storage_data)
        self._commit(records)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never chosen by a path


def file_name(group: str, number: int, n_files: int) -> str:
    """`model.safetensors`, or `model-00001-of-00004.safetensors` where there are several."""
    part = f"-{number:05d}-of-{n_files:05d}" if n_files > 1 else ""
    return f"{group}{part}.safetensors"


def _of_group(group: str, plan: SavePlan) -> list[WriteItem]:
    return [item for item in plan.items if item.index.fqn.startswith(f"{group}/")]


def _n_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None
    header_bytes = _ENTRY_BYTES + 3 * len(item.index.fqn)
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize + header_bytes


def _plan_pieces(items: list[WriteItem], planner: SavePlanner) -> TensorFile:
    """The file of these pieces; a tensor that is whole goes by its own name."""
    tensors: dict[str, torch.Tensor] = {}
    pieces: dict[str, Piece] = {}
    for item in items:
        data = item.tensor_data
        assert data is not None
        key = name = item.index.fqn.partition("/")[2]
        if data.chunk.sizes != data.size:
            piece = Piece(name, tuple(data.size), tuple(data.chunk.offsets))
            key = piece_key(piece, data.chunk.sizes)
            pieces[key] = piece
        if key in tensors:
            raise ValueError(f"two tensors of a checkpoint would both be called {key!r}")
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        tensors[key] = tensor
    return plan_file(tensors, pieces)


class _LoadPlanner(DefaultLoadPlanner):
    """Torch's planner, but for where a process's pieces lie, which `local_part` knows better."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, tensor in self.state_dict.items():
            local, offset = local_part(tensor)
            if local.numel():
                chunk = ChunkStorageMetadata(torch.Size(offset), local.shape)
                known = self.metadata.state_dict_metadata[name]
                assert isinstance(known, TensorStorageMetadata)
                items += create_read_items_for_chunk_list(name, known, [chunk])
        return LoadPlan(items)


class _Reader(StorageReader):
    """Reads slices of the entries of safetensors files, which are mapped, not loaded."""

    def __init__(self, stored: StoredTensors) -> None:
        self._stored = stored
        self._parts = {
            MetadataIndex(name, part.offset): part
            for name, tensor in stored.stored.items()
            for part in tensor.parts
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from load to load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size(tensor.shape),
                    [
                        ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.sizes))
                        for part in tensor.parts
                    ],
                )
                for name, tensor in self._stored.stored.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """The files are open already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            source = self._stored.read(self._parts[item.storage_index])
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            region = tuple(slice(start, start + length) for start, length in ranges)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source[region])
            planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never chosen by a path


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
