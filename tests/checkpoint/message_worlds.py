"""What the processes of `test_save_messages` do: they save models of 10 and 100 layers, and count
what they say to each other."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.owners import exchange, held_regions
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.checkpoint.state.replicas import differing_replicas
from pentameter.processes.group.world import World

DIMENSIONS = ("pipeline", "data", "shard", "tensor")
MESHES = {
    2: [(1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 1, 1, 1)],
    4: [(1, 4, 1, 1), (1, 2, 2, 1), (1, 1, 2, 2), (2, 1, 2, 1), (1, 2, 1, 2), (2, 2, 1, 1)],
}


class Counting(World):
    """A world that notes the bytes of each message."""

    sent: list[int]

    def all_gather(self, value: Any) -> list[Any]:
        self.sent.append(len(pickle.dumps(value)))
        return super().all_gather(value)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        value = super().broadcast(value, source)
        self.sent.append(len(pickle.dumps(value)))
        return value

    def all_reduce_max(self, value: int) -> int:
        self.sent.append(8)
        return super().all_reduce_max(value)


def state(mesh: DeviceMesh, n_layers: int, rows: int = 6) -> dict[str, dict[str, torch.Tensor]]:
    """A model of so many layers in this process's part, and an optimizer state of another shape."""
    stage, n_stages = mesh.get_coordinate()[0], mesh.size(0)
    model = {}
    for layer in range(n_layers):
        if layer % n_stages != stage:
            continue
        matrix, vector = (torch.arange(n, dtype=torch.float32) + 100 * layer for n in (rows * 4, 5))
        over = [Shard(0) if mesh.size(d) > 1 else Replicate() for d in (2, 3)]
        lies_on = mesh["shard", "tensor"]
        model[f"{layer}.weight"] = distribute_tensor(
            matrix.view(rows, 4), lies_on, over, src_data_rank=None
        )
        model[f"{layer}.bias"] = vector
    optimizer = {f"{name}.exp_avg": tensor * 2 for name, tensor in model.items()}
    optimizer |= {f"{name}.step": torch.tensor(3.0) for name in model}
    return {"model": model, "optimizer": optimizer}


def count_messages(world: World, folder: Path) -> dict[str, Any]:
    """Mesh and layers → the bytes of each message of a save, and of a comparison of copies."""
    found = {}
    for sizes in MESHES[world.size]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=DIMENSIONS)
        for n_layers in (10, 100):
            counting = Counting(world.rank, world.size)
            object.__setattr__(counting, "sent", [])
            tensors = state(mesh, n_layers)
            assert differing_replicas(tensors, counting, (mesh,)) is None
            store = CheckpointStore(folder / f"{sizes}-{n_layers}", run_id="r", config_hash="c")
            saved = store.save(Contents(1, tensors, {}, {}, {}), counting, (mesh,))
            found[f"{sizes} {n_layers}"] = counting.sent
            if world.is_main:
                _check(saved.path, n_layers)
    return found


def _check(path: Path, n_layers: int) -> None:
    checkpoint = open_checkpoint(path)  # each tensor exactly once
    model, optimizer = (checkpoint.tensors(group) for group in ("model", "optimizer"))
    assert len(model) == 2 * n_layers
    assert len(optimizer) == 4 * n_layers
    for layer in range(n_layers):
        matrix = torch.arange(24, dtype=torch.float32).view(6, 4) + 100 * layer
        assert torch.equal(model[f"{layer}.weight"][...], matrix)
        assert torch.equal(optimizer[f"{layer}.weight.exp_avg"][...], matrix * 2)


def compare_owners(world: World, folder: Path) -> list[str]:
    """Meshes for which placements say something else than the processes' own lists of regions."""
    from pentameter.checkpoint.format.owners import holdings

    wrong = []
    for sizes in MESHES[world.size]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=DIMENSIONS)
        for rows in (6, 5, 1):  # divides, does not, and leaves some processes without any
            tensors = state(mesh, 4, rows)
            told = exchange(held_regions(tensors), world)
            holds = holdings(tensors, (mesh,))
            wrong += [
                f"{sizes} {rows}: {region} is held by {ranks}, not {told[region]}"
                for region, ranks in holds.ranks_of.items()
                if ranks != told[region]
            ]
    return wrong


def save_what_only_some_hold(world: World, folder: Path) -> dict[str, Any]:
    """An optimizer that keeps other tensors in other ranks: the messages of three saves, the last
    of other tensors, and what was saved."""
    mesh = init_device_mesh("cpu", (1, world.size, 1, 1), mesh_dim_names=DIMENSIONS)
    store = CheckpointStore(folder, run_id="r", config_hash="c")
    sent = []
    for step, n_more in ((1, 0), (2, 0), (3, 1)):
        own = {f"{world.rank}.{n}.moment": torch.full((3,), world.rank) for n in range(9 + n_more)}
        counting = Counting(world.rank, world.size)
        object.__setattr__(counting, "sent", [])
        tensors = {"model": {"w": torch.ones(4)}, "optimizer": own}
        saved = store.save(Contents(step, tensors, {}, {}, {}), counting, (mesh,))
        sent.append(counting.sent)
    names = sorted(open_checkpoint(saved.path).tensors("optimizer"))
    return {"sent": sent, "names": names}
