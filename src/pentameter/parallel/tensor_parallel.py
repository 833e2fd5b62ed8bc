"""Tensor parallelism: several processes share each matrix of the model.

After Megatron-LM (Shoeybi et al. 2019) and, for `sequence`, Korthikanti et al. 2022. What is cut
is one literal table; the model's code stays as it is and works on the part that is here.

Shapes: B batch, T time, D d_model, V padded vocabulary.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch.distributed as dist
import torch.nn.functional as F
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
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from pentameter.config.schema import ModelConfig
from pentameter.model.dropout import AttentionDropout
from pentameter.model.gpt import GPT
from pentameter.model.loss import HeadLoss
from pentameter.parallel.divided_norm import divided_norm
from pentameter.parallel.mesh import name_of
from pentameter.planning.layout import Layout


def share_matrices(model: GPT, mesh: DeviceMesh, layout: Layout) -> None:
    """Cut the model's matrices over `mesh`, whose one dimension is `tensor`, in place.

    Nothing is sent: parameters are meant to be initialised or loaded afterwards. With `sequence`
    the stream between the shared matrices is divided by time, (B, T / n, D); the parameters that
    every process holds whole then get the gradient of its tokens alone, to be added up.
    """
    paths = [path for path, _ in model.named_modules()]
    table = {
        path: style
        for path, style in tensor_table(model.config, layout).items()
        if fnmatch.filter(paths, path)  # of a slice, and of an architecture, what it has
    }
    parallelize_module(model, mesh, table, src_data_rank=None)
    place, n_places = mesh.get_local_rank(), mesh.size()
    for module in model.modules():
        if isinstance(module, AttentionDropout):
            module.head_offset = place * (model.config.n_heads // n_places)
    if layout.sequence:
        model.stream_positions = partial(_own_positions, place, n_places)


def _own_positions(place: int, n_places: int, positions: Tensor) -> Tensor:
    """The positions of this process's part of the stream, which `Shard(1)` cuts into equal ones."""
    return positions.chunk(n_places)[place]


def tensor_table(config: ModelConfig, layout: Layout) -> dict[str, ParallelStyle]:
    """Module path → its style; the stream is whole in each process, or divided by time."""
    stream: Placement = Shard(1) if layout.sequence else Replicate()
    kv: ParallelStyle = ColwiseParallel()
    if layout.kv_copies > 1:
        kv = OwnRows(layout.tensor // layout.kv_copies)
    norm: ParallelStyle = NormOfOwnHeads() if config.qk_norm == "head" else NormOfAllHeads()
    return {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "blocks.*.attention": _all_tokens(stream, n_inputs=4),
        "blocks.*.attention.qkv": ColwiseParallel(),  # by head
        "blocks.*.attention.q": ColwiseParallel(),
        "blocks.*.attention.kv": kv,
        "blocks.*.attention.q_norm": norm,
        "blocks.*.attention.k_norm": norm,
        "blocks.*.attention.out": RowwiseParallel(output_layouts=stream),
        "blocks.*.mlp": _all_tokens(stream, n_inputs=3),
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=stream),
        "head": VocabularyParallel(stream),
        "head_loss": VocabularyParallel(stream),
    }


def _all_tokens(stream: Placement, n_inputs: int) -> PrepareModuleInput:
    """Give a sub-layer, whose first input is the stream, all tokens: gathered once for all of its
    matrices, whose gradients of them are summed at once."""
    rest = (None,) * (n_inputs - 1)
    return PrepareModuleInput(
        input_layouts=(stream, *rest), desired_input_layouts=(Replicate(), *rest)
    )


class OwnRows(ParallelStyle):
    """A projection (N, D) of keys and values of fewer heads than there are processes.

    Each process has all rows and multiplies with those of its own queries' head, which several
    processes do alike; its gradient is a part of the sum.
    """

    def __init__(self, n_parts: int) -> None:
        self.n_parts = n_parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        _keep_whole(module, device_mesh)
        part = device_mesh.get_local_rank() * self.n_parts // device_mesh.size()

        def forward(x: Tensor) -> Tensor:
            weight, bias = (
                None if each is None else _whole_of(each).chunk(self.n_parts)[part]
                for each in (module.weight, module.bias)
            )
            assert weight is not None
            return F.linear(_whole_of(x), weight, bias)

        return _running(module, forward)


class NormOfOwnHeads(ParallelStyle):
    """An RMSNorm of each head's channels, where each process has some heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.RMSNorm)
        _keep_whole(module, device_mesh)

        def forward(x: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], _whole_of(module.weight), module.eps)

        return _running(module, forward)


class NormOfAllHeads(ParallelStyle):
    """An RMSNorm of all heads' channels together, of which each process has some heads'."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.RMSNorm)
        part = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(part))
        group_name, eps = name_of(device_mesh.get_group()), module.eps
        assert eps is not None

        def forward(x: Tensor) -> Tensor:
            weight = module.weight
            own = weight.to_local() if isinstance(weight, DTensor) else weight
            y, _ = divided_norm(x, own, None, eps, False, group_name)
            return y

        return _running(module, forward)


def _running(module: Any, forward: Callable[[Tensor], Tensor]) -> nn.Module:
    """The module, which computes `forward` from now on; parameters and hooks stay."""
    module.forward = forward
    return cast(nn.Module, module)


def _keep_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(whole))


def _whole_of(tensor: Tensor) -> Tensor:
    """A tensor that every process has whole and uses in its own way: gradients are to be summed."""
    return tensor.to_local(grad_placements=[Partial()]) if isinstance(tensor, DTensor) else tensor


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
