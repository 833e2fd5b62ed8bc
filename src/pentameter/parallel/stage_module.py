"""One pipeline stage's slice of the model, run eagerly, compiled or fused, in the run's
precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.fsdp import FSDPModule

from pentameter.errors import StorageError
from pentameter.fused_cpu.step import fused_loss_sum
from pentameter.machine.capabilities import compiler_error
from pentameter.model.compiled import careful_options, with_own_code
from pentameter.model.gpt import GPT
from pentameter.model.loss import HeadLoss, compiled_row_loss, row_loss
from pentameter.parallel.mesh import Mesh
from pentameter.parallel.precision import Arithmetic
from pentameter.parallel.sources.model_source import ModelSlice
from pentameter.parallel.sources.tied_parameters import give_memory
from pentameter.parallel.tensor.tensor_products import gathered
from pentameter.parallel.waits import BucketSums
from pentameter.planning.plan import Plan
from pentameter.tree import Tree

REPLAYED_FLOPS = 2**43
"""FLOPs per micro-batch below which kernel launches are replayed as a CUDA graph. A fast GPU takes
some 20 ms for as many, about as long as a host needs to launch a deep model's kernels one by
one."""


class StageModule(nn.Module):
    """Runs one pipeline stage's slice of the model (eager, compiled or fused); DDP and FSDP wrap
    this module.

    Training and evaluation are eager, until `run_compiled` changes training, or `run_fused` both.
    `units` are the slice's modules that ZeRO all-gathers one by one, each paired with whether only
    matmuls read its parameters. `generator_offset` is for models that draw from PyTorch's
    generator: it is then seeded before each micro-batch with the key of the micro-batch's first row
    plus the offset. None leaves the generator alone.
    """

    def __init__(
        self,
        model_slice: ModelSlice,
        device: torch.device,
        arithmetic: Arithmetic,
        *,
        generator_offset: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model_slice.model
        self.units = model_slice.units
        self.device = device
        self.arithmetic = arithmetic
        self._call = model_slice.call
        self._call_by_row = model_slice.call_by_row
        self._generator_offset = generator_offset
        self.reads_inputs = model_slice.reads_inputs
        self.has_graph = False
        """Whether training runs the graph that `torch.compile` has made of the slice."""
        self.is_fused = False
        """Whether training and evaluation run the operations of `fused_cpu`."""
        self.graph_obstacle: str | None = None
        """The reason that the graph could not be made; then training has gone on eagerly."""
        self._train: Callable[..., Tensor] = self._plain
        self._evaluate: Callable[..., Tensor] = self._plain
        self.bucket_sums: BucketSums | None = None
        self._received: MessageShards | None = None
        self._sent: MessageShards | None = None
        self.replays = False
        """Whether training replays a CUDA graph. A replay overwrites the tensors that the previous
        one returned, so gradients must be added to a `.grad` that stays."""

    def forward(
        self,
        x: Tree,
        targets: Tree | None = None,
        dropout_keys: Tensor | None = None,
        inputs: Tree | None = None,
        *,
        by_row: bool = False,
    ) -> Tensor:
        """Run the slice. x is int64 (B, T) in the GPT's first stage, else the residual stream
        (B, T, D); `inputs` are the batch's own, for a slice that also reads them (`reads_inputs`).
        The last stage returns the summed loss (1,) for `targets` in nats, each batch row's (B,) if
        `by_row`, or logits (B, T, V) without targets; any other stage returns (B, T, D). There is
        no dropout without `dropout_keys` (B, …).

        Without targets, for sampling, matmuls run in the weights' dtype, as in `generate`; but
        weights all-gathered by FSDP come rounded.
        """
        run = self._train if self.training else self._evaluate
        if by_row:
            run = self._rows
        elif targets is None:
            run = self._plain
        rounds = targets is not None or isinstance(self, FSDPModule)
        if self._generator_offset is not None and dropout_keys is not None:
            torch.manual_seed(int(dropout_keys[0]) + self._generator_offset)
        if self._received is not None:
            x = Message.apply(x, self._received, False)
        if self.reads_inputs:
            x = (x, inputs)
        with self.arithmetic.autocast(self.device) if rounds else contextlib.nullcontext():
            y = run(x, targets, dropout_keys)
        if self._sent is not None:
            y = Message.apply(y, self._sent, True)
        # `stack` and not a view: FSDP's hook on module outputs would be lost on a view.
        return torch.stack((y,)) if y.ndim == 0 else y

    def shard_messages(self, mesh: Mesh, *, receives: bool, sends: bool) -> None:
        """From now on exchange the residual stream with other stages in shards, one per rank along
        `tensor`. If the slice `receives` from a stage, the incoming shards are all-gathered; if it
        `sends` to one, its output is only this rank's shard."""
        rank, n = mesh.coordinates["tensor"], mesh.layout.tensor
        shards = MessageShards(rank, n, mesh.group_name("tensor"))
        self._received = shards if receives else None
        self._sent = shards if sends else None

    def speed_up(self, plan: Plan, *, replays: bool) -> None:
        """Train from now on by fused operations, if the device is a CPU and they support the plan;
        on any other device or plan by `torch.compile`.

        `replays` permits CUDA graphs. They are used on CUDA for micro-batches below REPLAYED_FLOPS,
        when a GPU would wait for its host to launch kernels. Permit them only without collectives
        in hooks and without control flow that depends on values.
        """
        if self.device.type == "cpu" and plan.fused_obstacle is None:
            self.run_fused()
            return
        n_tokens = plan.micro_batch_size * plan.config.model.context_length
        is_short = n_tokens * plan.least_flops_per_token < REPLAYED_FLOPS
        self.run_compiled(replays=replays and is_short and self.device.type == "cuda")

    def run_compiled(self, *, replays: bool = False) -> None:
        """Train with `torch.compile` from now on. On a CPU its C++ is built with -O2, because g++
        makes wrong kernels with -O3.

        With `replays`, kernel launches are recorded once as CUDA graphs. Each `.grad` must then
        exist before autograd first runs, which would otherwise put it into the graph's own memory:
        call `allocate` afterwards.
        """
        # Imports PyTorch's compiler, which runs that compile nothing need not load.
        from pentameter.parallel.memory.recomputed_attention import WithoutGenerator

        self.replays, self.has_graph = replays, True
        careful: dict[str, Any] = {}
        if self.device.type == "cpu":
            with contextlib.suppress(StorageError):
                careful = careful_options()
        for module in self.model.modules():
            if isinstance(module, HeadLoss) and module.row_loss is row_loss:
                module.row_loss = compiled_row_loss  # a kernel that is compiled on its own
        graph = torch.compile(
            MethodType(with_own_code(self._call), self.model),
            dynamic=False,
            options={
                "joint_custom_post_pass": WithoutGenerator(),
                **({"triton.cudagraphs": True} if replays else {}),
                **careful,
            },
        )
        self._train = partial(self._first, graph)

    def _first(self, graph: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Run a training pass for the first time: make the graphs of the forward and of the
        backward pass, and run the forward one. If that fails, train eagerly from now on, this pass
        included. A step without a graph communicates as one with it, so that ranks may differ in
        this."""
        from torch._functorch import config  # its options have no other home

        try:
            # Else the backward graph would be made in the backward pass, which cannot start again.
            with config.patch(force_non_lazy_backward_lowering=True):
                result: Tensor = graph(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.run_plain()
            result = self._plain(*arguments)  # what is wrong with the model itself fails here, too
            self.graph_obstacle = compiler_error(error)
        else:
            self._train = graph
        return result

    def run_plain(self) -> None:
        """From now on, train eagerly, by PyTorch's own operations."""
        self._train, self.has_graph = self._plain, False

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """Context manager: inside it training is eager, even if this module was compiled or runs
        fused operations."""
        run, self._train = self._train, self._plain
        try:
            yield
        finally:
            self._train = run

    def run_captured(self) -> None:
        """Train from now on by the graphs that `torch.compile` captures (forward, backward and
        recomputation), but with PyTorch's own kernels instead of compiled ones: as exact as eager
        training, and ready in seconds."""
        own = MethodType(with_own_code(self._call), self.model)
        self._train = torch.compile(own, dynamic=False, backend="aot_eager")

    def run_fused(self) -> None:
        """Train and evaluate with the fused operations in `fused_cpu`, which support full GPTs
        only."""
        assert isinstance(self.model, GPT)
        self.is_fused = True
        self._train = self._evaluate = partial(_fused, self.model, self.arithmetic.products)

    def allocate(self, device: torch.device) -> None:
        """Allocate parameters on a device, uninitialized, in place; if a CUDA graph is replayed,
        also zero gradients for trained parameters, to which it adds. Buffers get memory on the
        device that computes: FSDP brings offloaded parameters there, but never buffers."""
        give_memory(self, device, self.device)
        for parameter in self.model.parameters() if self.replays else ():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def _plain(self, x: Tree, targets: Tree | None, dropout_keys: Tensor | None) -> Tensor:
        """Run the slice eagerly on x (B, …), with `targets` and `dropout_keys` as in `forward`.
        Returns the summed loss, 0-dim; logits if `targets` is None; or, before the last stage, the
        residual stream."""
        return self._call(self.model, x, targets, dropout_keys)

    def _rows(self, x: Tree, targets: Tree | None, dropout_keys: Tensor | None) -> Tensor:
        """Run the slice without dropout (`dropout_keys` are ignored). Return each batch row's
        summed loss in nats (B,), or the residual stream from a stage before the last."""
        return self._call_by_row(x, targets)


@contextlib.contextmanager
def adding_in_one_order(modules: Iterable[StageModule]) -> Iterator[None]:
    """Within this context the graphs that `torch.compile` makes for a CPU, if `modules` have any,
    are made and run with deterministic algorithms. Else their gradient of an embedding adds by
    atomic operations, in the order in which threads come to them, and no run repeats its bits."""
    if not any(each.has_graph and each.device.type == "cpu" for each in modules):
        yield
        return
    memory = torch.utils.deterministic
    kept = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        memory.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )
    torch.use_deterministic_algorithms(True, warn_only=not kept[0] or kept[1])
    fills = kept[0] and kept[2]  # it takes time
    memory.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(kept[0], warn_only=kept[1])
        memory.fill_uninitialized_memory = kept[2]  # type: ignore[attr-defined]


def _fused(
    model: GPT, dtype: torch.dtype, tokens: Tensor, targets: Tensor, dropout_keys: Tensor | None
) -> Tensor:
    """Compute the summed loss in nats, 0-dim, by the fused CPU operations; tokens and targets are
    (B, T), `dropout_keys` (B, n_sites, 2) or None, and matmul inputs have `dtype`."""
    with torch.autocast(tokens.device.type, enabled=False):  # the kernels choose their dtypes
        return fused_loss_sum(model, tokens, targets, dropout_keys, dtype)


class MessageShards(NamedTuple):
    """Record and functions by which tensor-parallel ranks send the residual stream from one
    pipeline stage to the next in shards. `rank` is this one's number among the `n` ranks of the
    group named `group_name`.

    After Narayanan et al. 2021, section 4.1. If these ranks hold the stream replicated, all would
    send the same. Instead each sends 1/n of the sequence, t = T / n tokens, and the receivers
    all-gather it, which takes less within a node than sending the full stream from node to node.
    """

    rank: int
    n: int
    group_name: str

    def own(self, whole: Tensor) -> Tensor:
        """Copy this rank's shard (B, t, D) out of a replicated tensor (B, T, D)."""
        return whole.chunk(self.n, 1)[self.rank].clone(memory_format=torch.contiguous_format)

    def gather(self, own: Tensor) -> Tensor:
        """All-gather the shards (B, t, D) along the sequence into (B, T, D). Collective."""
        return gathered(own, own.dtype, "by_time", self.group_name)


class Message(Function):
    """Autograd function at a stage boundary, for the residual stream. If `shards` is true, it
    returns this rank's shard, to be sent; else it all-gathers received shards. The gradient takes
    the inverse way."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, parts: MessageShards, shards: bool) -> Tensor:
        """Shard the stream, (B, T, D) → (B, t, D), if `shards`; else all-gather it, (B, t, D) →
        (B, T, D)."""
        ctx.parts, ctx.shards = parts, shards
        return parts.own(stream) if shards else parts.gather(stream)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """All-gather the gradient, (B, t, D) → (B, T, D), if `shards`; else shard it, (B, T, D) →
        (B, t, D)."""
        return ctx.parts.gather(g) if ctx.shards else ctx.parts.own(g), None, None
