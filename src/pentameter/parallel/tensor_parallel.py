"""Tensor parallelism: several processes share each matrix of the model.

After Megatron-LM (Shoeybi et al. 2019) and, for `sequence`, Korthikanti et al. 2022. What is cut
is one literal table; the model's code stays as it is and works on the part that is here.

Shapes: B batch, T time, D d_model, V padded vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from pentameter.model.dropout import AttentionDropout
from pentameter.model.gpt import GPT
from pentameter.model.loss import HeadLoss


def share_matrices(model: GPT, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Cut the model's matrices over `mesh`, whose one dimension is `tensor`, in place.

    Nothing is sent: parameters are meant to be initialised or loaded afterwards. With `sequence`
    the stream between the shared matrices is divided by time, (B, T / n, D); the parameters that
    every process holds whole then get the gradient of its tokens alone, to be added up.
    """
    table = {
        path: style
        for path, style in tensor_table(sequence).items()
        if hasattr(model, path.partition(".")[0])  # of a slice, what it has
    }
    parallelize_module(model, mesh, table, src_data_rank=None)
    place, n_places = mesh.get_local_rank(), mesh.size()
    for module in model.modules():
        if isinstance(module, AttentionDropout):
            module.head_offset = place * (model.config.n_heads // n_places)
    if sequence:
        model.stream_positions = partial(_own_positions, place, n_places)


def _own_positions(place: int, n_places: int, positions: Tensor) -> Tensor:
    """The positions of this process's part of the stream, which `Shard(1)` cuts into equal ones."""
    return positions.chunk(n_places)[place]


def tensor_table(sequence: bool) -> dict[str, ParallelStyle]:
    """Module path → its style; the stream is whole in each process, or divided by time."""
    stream: Placement = Shard(1) if sequence else Replicate()
    return {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "blocks.*.attention.qkv": ColwiseParallel(input_layouts=stream),  # by head
        "blocks.*.attention.out": RowwiseParallel(output_layouts=stream),
        "blocks.*.mlp.up": ColwiseParallel(input_layouts=stream),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=stream),
        "head": VocabularyParallel(stream),
        "head_loss": VocabularyParallel(stream),
    }


class VocabularyParallel(ParallelStyle):
    """A head (x, weight?) or its loss (x, weight, bias, targets), where each process has some rows
    of the weight (V, D) and of the bias (V,). Logits come out whole, the loss is the whole one."""

    def __init__(self, stream: Placement) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part))
        if isinstance(module, HeadLoss):
            module.register_forward_pre_hook(partial(self._parts, device_mesh))
            module.reduce = partial(_reduce, device_mesh)
        else:
            module.register_forward_pre_hook(partial(self._shared, device_mesh))
            module.register_forward_hook(_whole)
        return module

    def _parts(self, mesh: DeviceMesh, module: nn.Module, given: tuple[Any, ...]) -> Any:
        """Inputs of the loss: all of x, and this process's rows of weight and bias."""
        assert isinstance(module, HeadLoss)
        x, weight, bias, targets = given
        module.widest = -(-weight.shape[0] // mesh.size())
        module.first_column = mesh.get_local_rank() * module.widest
        x = self._replicated(x, mesh).to_local(grad_placements=[Partial()])
        return x, weight.to_local(), None if bias is None else bias.to_local(), targets

    def _shared(self, mesh: DeviceMesh, module: nn.Module, given: tuple[Any, ...]) -> Any:
        return self._replicated(given[0], mesh), *given[1:]

    def _replicated(self, x: Tensor, mesh: DeviceMesh) -> DTensor:
        x_shared = DTensor.from_local(x, mesh, [self.stream], run_check=False)
        return x_shared.redistribute(placements=[Replicate()])


def _whole(module: nn.Module, given: Any, logits: DTensor) -> Tensor:
    return logits.redistribute(placements=[Replicate()]).to_local()


def _reduce(mesh: DeviceMesh, tensor: Tensor, kind: Literal["max", "sum"]) -> None:
    op = dist.ReduceOp.MAX if kind == "max" else dist.ReduceOp.SUM
    dist.all_reduce(tensor, op, group=mesh.get_group())
