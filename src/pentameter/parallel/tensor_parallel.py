"""Tensor parallelism: several processes share each matrix of the model.

After Megatron-LM (Shoeybi et al. 2019) and, for `sequence`, Korthikanti et al. 2022. What is cut
is one literal table; the model's code stays as it is and works on the part that is here. Divided
parameters are DTensors, for whoever shards, saves or counts them; modules compute with what is here
of them, and `tensor_products.py` sends.

Shapes: B batch, T time, D d_model, V padded vocabulary; n processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
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

from pentameter.model.attention import Attention
from pentameter.model.dropout import AttentionDropout
from pentameter.model.gpt import GPT, MLP
from pentameter.model.loss import HeadLoss
from pentameter.parallel.divided_norm import divided_norm
from pentameter.parallel.mesh import name_of
from pentameter.parallel.parts import gathered_columns, reduce_parts
from pentameter.parallel.precision import product_dtype
from pentameter.parallel.tensor_products import (
    Order,
    gather_stream,
    read_stream,
    sum_stream,
)
from pentameter.planning.plan import Plan

Style = Callable[["Sharing", Any], None]
"""Divides a module's work, in place."""
_BY_ROWS = Shard(0)


@dataclass(frozen=True)
class Sharing:
    """A process's place among those that share a model's matrices."""

    plan: Plan
    mesh: DeviceMesh
    place: int
    size: int
    group_name: str

    @staticmethod
    def of(plan: Plan, mesh: DeviceMesh) -> Sharing:
        """The Sharing of a process of `mesh`, whose one dimension is `tensor`."""
        return Sharing(plan, mesh, mesh.get_local_rank(), mesh.size(), name_of(mesh.get_group()))

    def tokens(self, *, by_time: bool = False) -> tuple[Order, str]:
        """How all tokens lie, and the group that shares them. What takes each by itself finds them
        where messages leave them, unless it must have them by time."""
        if not self.plan.layout.sequence:
            return "whole", self.group_name
        return ("by_time" if by_time else "by_process"), self.group_name

    def as_they_lie(self, tokens: Tensor) -> Tensor:
        """Ids (B, T) in the order of `tokens()`."""
        if not self.plan.layout.sequence:
            return tokens
        return tokens.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1)

    def place_parameters(self, module: nn.Module, placement: Placement, *names: str) -> None:
        """Make DTensors of a module's parameters of these names, where it has them."""
        for name in names:
            parameter = getattr(module, name)
            if parameter is not None:
                placed = distribute_tensor(parameter, self.mesh, [placement], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(placed))

    def rows(self, linear: nn.Linear) -> list[Tensor]:
        """Of a matrix that reads the stream the rows that are multiplied here, and of its bias. Of
        what each process has whole, keys and values of few heads, those of its own queries' head,
        which several processes multiply with alike."""
        parts = [own_part(each) for each in (linear.weight, linear.bias) if each is not None]
        if not is_whole(linear.weight):
            return parts
        n_parts = self.size // self.plan.layout.kv_copies
        return [each.chunk(n_parts)[self.place * n_parts // self.size] for each in parts]


def tensor_table() -> dict[str, Style]:
    """Module path → how its work is divided."""
    return {
        "token_embedding": _divide_look_up,
        "blocks.*.attention": partial(_read_together, by_time=True),
        "blocks.*.attention.qkv": _divide_rows,  # by head
        "blocks.*.attention.q": _divide_rows,
        "blocks.*.attention.kv": _divide_keys_and_values,
        "blocks.*.attention.?_norm": _divide_norm_of_heads,
        "blocks.*.attention.out": partial(_divide_columns, by_time=True),
        "blocks.*.mlp": _read_together,
        "blocks.*.mlp.gate": _divide_rows,
        "blocks.*.mlp.up": _divide_rows,
        "blocks.*.mlp.down": _divide_columns,
        "head": _divide_logits,
        "head_loss": _divide_loss,
    }


def share_matrices(model: GPT, mesh: DeviceMesh, plan: Plan) -> None:
    """Cut the model's matrices over `mesh`, whose one dimension is `tensor`, in place.

    Nothing is sent: parameters are meant to be initialised or loaded afterwards. With `sequence`
    the stream between the shared matrices is divided by time, (B, T / n, D); the parameters that
    every process holds whole then get the gradient of its tokens alone, to be added up.
    """
    sharing = Sharing.of(plan, mesh)
    divide_modules(model, tensor_table(), sharing)
    for module in model.modules():
        if isinstance(module, AttentionDropout):
            module.head_offset = sharing.place * (model.config.n_heads // sharing.size)
    if plan.layout.sequence:
        model.stream_positions = partial(_own_positions, sharing.place, sharing.size)


def divide_modules(model: GPT, table: Mapping[str, Callable[[Any, Any], None]], by: Any) -> None:
    """Divide each module whose path a pattern of the table matches, in place."""
    for path, module in model.named_modules():
        for pattern, divide in table.items():
            if fnmatchcase(path, pattern):
                divide(by, module)


def _own_positions(place: int, n_places: int, positions: Tensor) -> Tensor:
    """The positions of this process's part of the stream, which is cut into equal ones."""
    return positions.chunk(n_places)[place]


def is_whole(parameter: Tensor) -> bool:
    """Whether a parameter is a DTensor that every process has whole."""
    return isinstance(parameter, DTensor) and all(p.is_replicate() for p in parameter.placements)


def own_part(parameter: Tensor) -> Tensor:
    """The numbers of a parameter that are here. Of one that every process has whole, and uses in
    its own way, the gradients are to be summed."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] if is_whole(parameter) else None)


def run_instead(module: Any, forward: Callable[..., Tensor]) -> None:
    """Let a module compute `forward`; its parameters and its hooks stay."""
    module.forward = forward


# -- products -------------------------------------------------------------------------------------


def _read_together(sharing: Sharing, module: Attention | MLP, *, by_time: bool = False) -> None:
    """The matrices of a sub-layer that read the stream, which is gathered once for all of them."""
    plan, tokens = sharing.plan, sharing.tokens(by_time=by_time)
    at_once = plan.rules.reads_at_once(plan.config.lora)

    def read(x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        dtype = product_dtype(x)
        if not at_once:
            every = gather_stream(x, dtype, *tokens)
            return [linear(every) for linear in linears]
        parts = [[part.to(dtype) for part in sharing.rows(linear)] for linear in linears]
        weights = [weight for weight, *_ in parts]
        biases = [bias for _, *rest in parts for bias in rest]
        return read_stream(x.to(dtype), weights, biases, *tokens)

    module.read = read


def _divide_rows(sharing: Sharing, module: nn.Linear, placement: Placement = _BY_ROWS) -> None:
    sharing.place_parameters(module, placement, "weight", "bias")
    run_instead(module, lambda x: F.linear(x, *sharing.rows(module)))


def _divide_keys_and_values(sharing: Sharing, module: nn.Linear) -> None:
    """The rows of its own heads; of fewer heads than there are processes, all in each."""
    are_few = sharing.plan.layout.kv_copies > 1
    _divide_rows(sharing, module, Replicate() if are_few else _BY_ROWS)


def _divide_columns(sharing: Sharing, module: nn.Linear, *, by_time: bool = False) -> None:
    """Partial sums, to which an adapter may add its own; then all are added up, and each process
    adds the bias to its tokens."""
    sharing.place_parameters(module, Shard(1), "weight")
    run_instead(module, lambda x: F.linear(x, own_part(module.weight)))
    tokens = sharing.tokens(by_time=by_time)

    def add_up(module: nn.Linear, given: Any, y: Tensor) -> Tensor:
        y = sum_stream(y, *tokens)
        bias: Tensor | None = module.bias
        return y if bias is None else y + bias.to(y.dtype)

    module.register_forward_hook(add_up)


# -- norms and embeddings -------------------------------------------------------------------------


def _divide_norm_of_heads(sharing: Sharing, module: nn.RMSNorm) -> None:
    """Of each head's channels a process has all or none, of all heads' together its own heads'."""
    of_each = sharing.plan.config.model.qk_norm == "head"
    sharing.place_parameters(module, Replicate() if of_each else _BY_ROWS, "weight")
    eps = module.eps
    assert eps is not None

    def forward(x: Tensor) -> Tensor:
        weight = own_part(module.weight)
        if of_each:
            return F.rms_norm(x, x.shape[-1:], weight, eps)
        y, _ = divided_norm(x, weight, None, eps, False, sharing.group_name)
        return y

    run_instead(module, forward)


def _divide_look_up(sharing: Sharing, module: nn.Embedding) -> None:
    """Each process looks up the tokens of its part of the vocabulary; the sums are the rows."""
    sharing.place_parameters(module, _BY_ROWS, "weight")
    first = sharing.place * -(-module.num_embeddings // sharing.size)

    def forward(tokens: Tensor) -> Tensor:
        weight, places = own_part(module.weight), sharing.as_they_lie(tokens) - first
        here = (places >= 0) & (places < len(weight))
        rows = F.embedding(torch.where(here, places, 0), weight)
        return sum_stream(torch.where(here[..., None], rows, 0.0), *sharing.tokens())

    run_instead(module, forward)


# -- the head and its loss ------------------------------------------------------------------------


def _divide_logits(sharing: Sharing, module: Any) -> None:
    """Whole logits (B, T, V), of a weight and a bias of which some rows are here; to look at, as
    no gradient comes through them."""
    sharing.place_parameters(module, _BY_ROWS, *dict(module.named_parameters(recurse=False)))

    def forward(x: Tensor, weight: Tensor | None = None) -> Tensor:
        weight = module.weight if weight is None else weight
        every = gather_stream(x, product_dtype(x), *sharing.tokens(by_time=True))
        bias = None if module.bias is None else own_part(module.bias)
        own = F.linear(every, own_part(weight), bias)
        V = len(weight)
        return gathered_columns(own, -(-V // sharing.size), V, sharing.group_name)

    run_instead(module, forward)


def _divide_loss(sharing: Sharing, module: HeadLoss) -> None:
    """The whole loss in each process, of its part of the logits."""

    # Compiled, processes of a machine would take each other's code out of a cache that sees the
    # sizes of the whole weight alone.
    @torch.compiler.disable
    def parts(module: HeadLoss, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs of the loss: all of x, and this process's rows of weight and bias."""
        x, weight, bias, targets = given
        module.widest = -(-len(weight) // sharing.size)
        module.first_column = sharing.place * module.widest
        every = gather_stream(x, product_dtype(x), *sharing.tokens())
        own_bias = None if bias is None else own_part(bias)
        return every, own_part(weight), own_bias, sharing.as_they_lie(targets)

    module.register_forward_pre_hook(parts)
    module.reduce = partial(reduce_parts, sharing.group_name)
