"""Small worlds of real processes, one for each layout, and a toy model cut as the layout says."""

from __future__ import annotations

import gc
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.checkpoint.state.state_dicts import model_state, optimizer_state
from pentameter.optim.build import JointOptimizer
from pentameter.processes.group.world import World

V, D, F, E = 65, 8, 12, 3  # 65 divides by neither 2 nor 4, nor do 3 experts

TABLE = {
    "embedding.weight": (V, D),
    "norm.weight": (D,),
    "up.weight": (F, D),
    "up.bias": (F,),
    "down.weight": (D, F),
    "down.bias": (D,),
    "head.weight": (V, D),
    "experts.weight": (E, F, D),
}
MUON = {"up.weight", "down.weight"}
STEP = 7.0


@dataclass(frozen=True)
class Shape:
    """Degrees of a layout."""

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    row: int = 1
    tensor: int = 1
    expert: int = 1
    """Of the processes of data × shard × tensor, so many hold different experts."""
    expert_tensor: int = 1
    """And so many different rows of an expert's matrix."""

    @property
    def size(self) -> int:
        return self.pipeline * self.data * self.shard * self.row * self.tensor


LAYOUTS = {
    "one process": Shape(),
    "data": Shape(data=2),
    "tensor": Shape(tensor=2),
    "pipeline": Shape(pipeline=2),
    "data-tensor": Shape(data=2, tensor=2),
    "data-pipeline": Shape(data=2, pipeline=2),
    "tensor-pipeline": Shape(tensor=2, pipeline=2),
    "data-tensor-pipeline": Shape(data=2, tensor=2, pipeline=2),
    "zero": Shape(shard=2),
    "zero-copies": Shape(data=2, shard=2),
    "zero-tensor": Shape(shard=2, tensor=2),
    "zero-tensor-uneven": Shape(shard=4, tensor=2),  # 65 rows → 33 + 32 → 9 9 9 6 and 8 8 8 8
    "grid": Shape(row=2, tensor=2),
    "data-grid": Shape(data=2, row=2, tensor=2),
    "grid-pipeline": Shape(pipeline=2, row=2, tensor=2),
    "expert": Shape(data=2, expert=2),
    "expert-tensor": Shape(tensor=2, expert_tensor=2),
    "expert-zero": Shape(shard=4, expert=2),
    "expert-pipeline": Shape(pipeline=2, data=2, tensor=2, expert=2, expert_tensor=2),
}
"""What divides time, or the depth of a grid, divides no parameter: to a checkpoint it is data."""
GRID = {
    "embedding.weight": (Shard(0), Shard(1)),
    "up.weight": (Shard(0), Shard(1)),
    "down.weight": (Shard(1), Shard(0)),
    "head.weight": (Shard(0), Shard(1)),
}
"""Placements along (row, tensor); of vectors only the second dimension divides."""


def true_value(name: str) -> torch.Tensor:
    """The whole tensor: other numbers for each name and element."""
    shape = TABLE[name]
    start = 1000 * sorted(TABLE).index(name)
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) + start).view(shape) / 7


def true_state() -> dict[str, dict[str, torch.Tensor]]:
    """What every checkpoint here holds, whole."""
    optimizer = {}
    for name in TABLE:
        value = true_value(name)
        if name in MUON:
            optimizer[f"{name}.momentum_buffer"] = value * 2
        else:
            optimizer[f"{name}.step"] = torch.tensor(STEP)
            optimizer[f"{name}.exp_avg"] = value * 2
            optimizer[f"{name}.exp_avg_sq"] = value * 4
    return {"model": {name: true_value(name) for name in TABLE}, "optimizer": optimizer}


class Toy(nn.Module):
    """A slice: the first half has the embedding, the second the head and a copy of the embedding,
    as a tied head across stages has."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        if first:
            self.norm = nn.LayerNorm(D, bias=False)
            self.up = nn.Linear(D, F)
            self.experts = nn.Module()
            self.experts.weight = nn.Parameter(torch.empty(E, F, D))
        if last:
            self.down = nn.Linear(F, D)
            self.head = nn.Linear(D, V, bias=False)


@dataclass
class Held:
    """What a process holds of the toy: parameters, optimizer, and what others save."""

    model: Toy
    optimizer: JointOptimizer
    copies: set[str]
    meshes: list[DeviceMesh]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        model = model_state(self.model)
        return {
            "model": {n: t for n, t in model.items() if n not in self.copies},
            "optimizer": optimizer_state(self.optimizer, self.named(), self.copies),
        }


def hold(shape: Shape, rank: int, *, filled: bool) -> Held:
    """This process's part, cut by torch itself; without `filled` all numbers are zero."""
    place = rank // (shape.size // shape.pipeline)
    model, mesh = Toy(first=place == 0, last=place == shape.pipeline - 1), None
    of_experts: DeviceMesh | None = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(true_value(name) if filled else torch.zeros(TABLE[name]))
    if shape.size > 1:
        dimensions = ("pipeline", "data", "shard", "row", "tensor")
        sizes = (shape.pipeline, shape.data, shape.shard, shape.row, shape.tensor)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=dimensions)
        if shape.row > 1:
            divide(model, mesh["row", "tensor"])
        elif shape.tensor > 1:
            cut = {
                "embedding": RowwiseParallel(input_layouts=Replicate()),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
                "head": ColwiseParallel(),
            }
            own = {name: how for name, how in cut.items() if hasattr(model, name)}
            parallelize_module(model, mesh["tensor"], own)
        if shape.expert * shape.expert_tensor > 1:
            of_experts = share_experts(model, shape)
        if shape.shard > 1:
            fully_shard(model, mesh=mesh["data", "shard"] if shape.data > 1 else mesh["shard"])
    copies = {"embedding.weight"} if place > 0 else set()
    optimizer = build(model)
    if filled:
        fill(optimizer)
    meshes = [each for each in (mesh, of_experts) if each is not None]
    return Held(model, optimizer, copies, meshes)


def share_experts(model: nn.Module, shape: Shape) -> DeviceMesh:
    """Divide the experts over a mesh of their own, which factors the same processes otherwise; what
    is left of them holds copies, or shards with `shard`."""
    n_ranks = shape.expert * shape.expert_tensor
    left = shape.size // shape.pipeline // n_ranks
    names = ("pipeline", "rest", "expert", "expert_tensor")
    sizes = (shape.pipeline, left, shape.expert, shape.expert_tensor)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if hasattr(model, "experts"):
        along = mesh["expert", "expert_tensor"]
        part = distribute_tensor(
            model.experts.weight.detach(), along, (Shard(0), Shard(1)), src_data_rank=None
        )
        model.experts.weight = nn.Parameter(part)
        if shape.shard > 1:
            fully_shard(model.experts, mesh=mesh["rest"])
    return mesh


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Put blocks in the place of a model's parameters."""
    for module in model.modules():
        for name, whole in list(module.named_parameters(recurse=False)):
            full = next(n for n, p in model.named_parameters() if p is whole)
            placements = GRID.get(full, (Replicate(), Shard(0)))
            part = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
            setattr(module, name, nn.Parameter(part))


def build(model: nn.Module) -> JointOptimizer:
    named = dict(model.named_parameters())
    return JointOptimizer(
        torch.optim.Muon([p for n, p in named.items() if n in MUON], lr=0.25),
        torch.optim.AdamW([p for n, p in named.items() if n not in MUON], lr=0.25),
    )


def fill(optimizer: JointOptimizer) -> None:
    """A state that is exact in every layout: powers of two times the parameters."""
    muon, adamw = optimizer.parts
    for group in muon.param_groups:
        for p in group["params"]:
            muon.state[p]["momentum_buffer"] = p.detach() * 2
    for group in adamw.param_groups:
        for p in group["params"]:
            adamw.state[p].update(
                step=torch.tensor(STEP), exp_avg=p.detach() * 2, exp_avg_sq=p.detach() * 4
            )


def store_in(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", run_id="r", config_hash="c")


def save(folder: Path, held: Held, world: World, step: int = 1) -> Path:
    extra = {"config.toml": b"seed = 1\n"}
    degrees = {"data": world.size}
    store, state = store_in(folder), {"step": step}
    saved = store.save(Contents(step, held.state(), state, extra, degrees), world, held.meshes)
    return saved.path


# -- processes ----------------------------------------------------------------------------------

_context = multiprocessing.get_context("forkserver")


def run_world(size: int, work: Callable[..., Any], *arguments: Any, seconds: float = 60) -> list:
    """What `work(world, *arguments)` returned in each of `size` new processes, by rank.

    A failure of one fails here, with its traceback.
    """
    rendezvous = _context.Queue()
    with _rendezvous_file() as file:
        processes = [
            _context.Process(
                target=_in_world, args=(rendezvous, file, rank, size, work, arguments), daemon=True
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        results: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        try:
            while len(results) < size:
                rank, value, failure = rendezvous.get(timeout=max(0.1, deadline - time.monotonic()))
                assert failure is None, f"rank {rank} of {size}:\n{failure}"
                results[rank] = value
            for process in processes:
                process.join(10)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
    return [results[rank] for rank in range(size)]


def _in_world(results, file, rank, size, work, arguments) -> None:
    gc.freeze()  # what the server has imported need not be searched for cycles
    torch.set_num_threads(1)
    try:
        if size > 1:
            join(file, rank, size)
        results.put((rank, work(World(rank, size, rank, size), *arguments), None))
        if size > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def join(file: str, rank: int, size: int, patience: timedelta | None = None) -> None:
    """Join `size` processes; `patience` is the longest wait for another in a collective, without
    which it is PyTorch's."""
    dist.init_process_group("gloo", f"file://{file}", patience, world_size=size, rank=rank)


class _rendezvous_file:  # noqa: N801 - a context manager
    def __enter__(self) -> str:
        import tempfile

        self._folder = tempfile.TemporaryDirectory()
        return str(Path(self._folder.name) / "rendezvous")

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


# -- work for them ------------------------------------------------------------------------------


def save_layouts(world: World, folder: Path, layouts: Sequence[str]) -> dict[str, Path]:
    """Layout → its checkpoint, of each of `layouts` with as many processes as the world."""
    return {
        layout: save(folder / layout, hold(LAYOUTS[layout], world.rank, filled=True), world)
        for layout in layouts
        if LAYOUTS[layout].size == world.size
    }


def load_layouts(
    world: World, paths: dict[str, Path], layouts: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Layout → saver → what is wrong with what this process read from its checkpoint."""
    return {
        layout: _load_each(world, layout, paths)
        for layout in layouts
        if LAYOUTS[layout].size == world.size
    }


def _load_each(world: World, layout: str, paths: dict[str, Path]) -> dict[str, str]:
    shape = LAYOUTS[layout]
    true = hold(shape, world.rank, filled=True)
    held = hold(shape, world.rank, filled=False)
    wrong = {}
    for saver, path in paths.items():
        wipe(held)
        read(world, held, path)
        wrong[saver] = "; ".join(_differences(held, true))
    step(held)  # what was loaded is what torch's optimizers want
    step(true)
    wrong[layout] += "; ".join(_differences(held, true))
    return wrong


def wipe(held: Held) -> None:
    for part in held.optimizer.parts:
        part.state.clear()
    for tensor in model_state(held.model).values():
        _local(tensor).zero_()


def read(world: World, held: Held, path: Path) -> None:
    from pentameter.checkpoint.folders.opening import open_checkpoint
    from pentameter.checkpoint.state.state_dicts import load_model_state, load_optimizer_state

    checkpoint = open_checkpoint(path)
    load_model_state(held.model, checkpoint.tensors("model"), world)
    stored = checkpoint.tensors("optimizer")
    load_optimizer_state(held.optimizer, held.named(), stored, world)


def step(held: Held) -> None:
    for _, parameter in held.named():
        parameter.grad = parameter.detach() * 0.5
    held.optimizer.step()


def _differences(held: Held, true: Held) -> Iterator[str]:
    for group, own, other in (
        ("model", model_state(held.model), model_state(true.model)),
        (
            "optimizer",
            optimizer_state(held.optimizer, held.named()),
            optimizer_state(true.optimizer, true.named()),
        ),
    ):
        if own.keys() != other.keys():
            yield f"{group}: {own.keys() ^ other.keys()}"
        for name in own.keys() & other.keys():
            a, b = own[name], other[name]
            if type(a) is not type(b) or not torch.equal(_local(a), _local(b)):
                yield f"{group}: {name}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
