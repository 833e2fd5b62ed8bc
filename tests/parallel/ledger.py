"""A ledger of what this process sends and receives: calls and bytes, along each dimension.

It stands on PyTorch's dispatch, where every collective passes with its tensors and its group:
those of DTensor (`_c10d_functional`), and those of `fully_shard`, of DDP's communication hook, of
pipeline schedules and of our own code (`c10d`). PyTorch's CommDebugMode is built in the same way,
but counts neither bytes nor what is sent from one process to one other. The profiler sees the
same operations and their sizes, but with gloo not the group they belong to.

What it cannot see: collectives inside of compiled code; what DDP's reducer sends without its hook,
which is only the order of buckets in its second step; and rendezvous through the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # documented by this path

from pentameter.estimating.bytes.communication import WORLD, Communication, CommunicationCounter
from pentameter.estimating.bytes.operation_communication import Kind
from pentameter.parallel.context.context_parallel import exchanged
from pentameter.parallel.context.ring_attention import attend_around, differentiate_around
from pentameter.parallel.experts.expert_parallel import counts_exchanged, start_rows
from pentameter.parallel.grid import product_3d, summa
from pentameter.parallel.tensor import collectives, sharded_norm, tensor_products
from pentameter.planning.layouts.layout import MESH_DIMENSIONS, Layout

OPERATIONS: dict[str, tuple[Kind, Callable[..., Any]]] = {
    # Name: kind, and of its arguments what counts as handed over.
    "allreduce_": ("all_reduce", lambda tensors, *_: tensors),
    "allreduce_coalesced_": ("all_reduce", lambda tensors, *_: tensors),
    "_allgather_base_": ("all_gather", lambda gathered, *_: gathered),
    "allgather_": ("all_gather", lambda gathered, *_: gathered),
    "allgather_into_tensor_coalesced_": ("all_gather", lambda gathered, *_: gathered),
    "_reduce_scatter_base_": ("reduce_scatter", lambda _, given, *__: given),
    "reduce_scatter_": ("reduce_scatter", lambda _, given, *__: given),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", lambda _, given, *__: given),
    "send": ("send", lambda tensors, *_: tensors),
    "recv_": ("receive", lambda tensors, *_: tensors),
    "broadcast_": ("broadcast", lambda tensors, *_: tensors),
    "reduce_": ("reduce", lambda tensors, *_: tensors),
    "alltoall_base_": ("all_to_all", lambda _, given, *__: given),
    "all_reduce": ("all_reduce", lambda tensor, *_: tensor),
    "all_reduce_": ("all_reduce", lambda tensor, *_: tensor),
    "all_gather_into_tensor": ("all_gather", lambda tensor, n, *_: [tensor] * n),
    "reduce_scatter_tensor": ("reduce_scatter", lambda tensor, *_: tensor),
}
BODIES: dict[str, Callable[..., Any]] = {
    "ring_attention": attend_around,
    "ring_attention_backward": differentiate_around,
    "exchange": exchanged,
    "exchange_counts": counts_exchanged,
    "exchange_rows": start_rows,
    "gather_tokens": collectives.gathered_shards,
    "summa": summa.multiplied,
    "summa_backward": summa.differentiated,
    "product_3d": product_3d.multiplied,
    "product_3d_backward": product_3d.differentiated,
    "sharded_norm": sharded_norm.normed,
    "sharded_norm_backward": sharded_norm.differentiated,
    "gather_stream": tensor_products.gathered,
    "sum_stream": tensor_products.summed,
    "read_stream": tensor_products.multiplied,
    "read_stream_backward": tensor_products.differentiated,
    "all_gather_shards": collectives.gathered_shards,
    "reduce_scatter_shards": collectives.reduced_shard,
}
"""Operations of our own, which hide what they are made of from PyTorch's dispatch."""
SENDS_NOTHING = (
    "chosen_experts",
    "ends_on_host",
    "grouped_linear_at_once",
    "grouped_input_gradient_at_once",
    "grouped_weight_gradient_at_once",
    "grouped_linear",
    "grouped_input_gradient",
    "grouped_weight_gradient",
    "grouped_bias_gradient",
)
"""Operations of our own without collectives."""
NOT_SENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


class Ledger(TorchDispatchMode):
    """Counts what this process sends within its `with`, by (dimension, kind).

    Bytes and dimensions are as `pentameter.estimating.bytes.communication` defines them. Groups of
    one rank send nothing and are left out. The first two steps of DDP are not like the later ones.
    A group that two meshes share counts for the first one's dimension; `named` maps the names of
    other groups to dimensions.
    """

    def __init__(self, layout: Layout, *meshes: DeviceMesh, named: Mapping[str, str] = {}) -> None:
        super().__init__()
        self._layout = layout
        self._counter = CommunicationCounter()
        self._dimensions: dict[str, str | None] = dict(named)  # by name of the group
        for mesh in meshes:
            for name in mesh.mesh_dim_names or ():
                group = mesh.get_group(name)
                self._dimensions.setdefault(group.group_name, name if group.size() > 1 else None)

    @property
    def traffic(self) -> Mapping[tuple[str, Kind], Communication]:
        """What was counted so far."""
        return self._counter.counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, and count it if it is a collective."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # comes again as what a DTensor makes of it
        name = func.name().partition("::")[2]
        if func.namespace == "pentameter" and name not in SENDS_NOTHING:
            with self:
                return BODIES[name](*args)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name in NOT_SENT:
            return
        if name not in OPERATIONS:
            raise NotImplementedError(f"the ledger does not know the collective {name}; add it")
        kind, payload = OPERATIONS[name]
        tensors = _tensors(payload(*args))
        dimension = self._dimension(args)
        if dimension is not None:
            is_number = all(tensor.ndim <= 1 and tensor.numel() == 1 for tensor in tensors)
            n_bytes = sum(tensor.nbytes for tensor in tensors)
            self._counter.add(WORLD if is_number else dimension, kind, n_bytes)

    def _dimension(self, args: tuple[Any, ...]) -> str | None:
        """The dimension along which the processes of a collective's group lie; None where it has
        only one process."""
        for argument in args:
            if isinstance(argument, str) and argument in self._dimensions:
                return self._dimensions[argument]
            if isinstance(argument, torch.ScriptObject):
                group = dist.ProcessGroup.unbox(argument)
                if group.group_name not in self._dimensions:
                    self._dimensions[group.group_name] = self._dimension_of(group)
                return self._dimensions[group.group_name]
        raise NotImplementedError("a collective of a group that is not of the mesh")

    def _dimension_of(self, group: dist.ProcessGroup) -> str | None:
        """That of a group which the mesh did not make, by the places of its processes."""
        places = [self._layout.coordinates(r) for r in dist.get_process_group_ranks(group)]
        differing = [name for name in MESH_DIMENSIONS if len({each[name] for each in places}) > 1]
        if len(differing) > 1:
            return WORLD
        return differing[0] if differing else None


def _tensors(nested: Any) -> list[Tensor]:
    if isinstance(nested, Tensor):
        return [nested]
    return [tensor for each in nested for tensor in _tensors(each)]
