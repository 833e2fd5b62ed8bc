"""Activation recomputation (checkpointing): blocks drop activations in the forward pass, and
recompute them for the backward pass."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pentameter.config.choices import refuse_unknown
from pentameter.model.experts import Router
from pentameter.parallel.linear import Forward
from pentameter.tree import map_leaves

_SAVED_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_SAVED_NAMES = (
    "scaled_dot_product",
    "dropped_attention",
    "ring_attention",
    "read_stream",
    "summa",
    "product_3d",
    "grouped_linear",
    "fp8_product",
    "exchange_rows",
    "gather_tokens",
)
_ROUTING_NAMES = ("chosen_experts", "exchange_counts", "ends_on_host")
"""Operations that decide which experts a token gets, and the one for which the host waits. Their
results are kept however a block is recomputed: a second pass that chose otherwise would
differentiate another function."""
_RANDOM_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
"""PyTorch's attention on a CPU, which counts as random whether or not it drops weights. Of each
random operation that is computed again, the compiler hands the generator's state to the backward
pass behind a DTensor's mesh, where its own runtime expects no tensor (`functionalize_rng_ops` in
torch 2.13 and 2.14; on a GPU the state goes another way)."""


def recomputed(
    blocks: Iterable[nn.Module],
    how: Literal["selective", "full"] | None,
    *,
    draws_from_generator: bool = False,
) -> dict[nn.Module, Forward]:
    """Map each block to a forward that drops its activations, and recomputes them in the backward
    pass; empty if `how` is None.

    `full` keeps only a block's input and its routing, and where a block with sharded weights is
    compiled for a CPU its attention. `selective` also keeps the outputs of matmuls and fused
    attention, and what experts exchange, and recomputes elementwise operations: norms, activation
    functions, dropout, and the weights in attention that materializes them, which are the largest
    tensors.

    Pass `draws_from_generator` for blocks that draw from PyTorch's generator, whose state is then
    restored for the second pass; keyed dropout needs none. Raises ConfigError for an unknown `how`.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws_from_generator}
    if how is None:
        return {}
    return {
        block: partial(_recomputed, block.forward, {**options, **_kept(block, how)})
        for block in blocks
    }


def _kept(block: nn.Module, how: Literal["selective", "full"]) -> dict[str, Any]:
    """Return the arguments for `torch.utils.checkpoint` that say which results of a block it keeps;
    {} to keep only the block's input."""
    match how:
        case "full":
            has_router = any(isinstance(module, Router) for module in block.modules())
            names = _ROUTING_NAMES if has_router else ()
            if any(isinstance(parameter, DTensor) for parameter in block.parameters()):
                return {"context_fn": partial(_contexts_of_sharded, block, names)}
            if not names:
                return {}
            policy: Callable[..., CheckpointPolicy] = partial(_keep_named, names)
        case "selective":
            policy = _keep_matmuls
        case unknown:
            refuse_unknown(unknown, "train.activation_checkpoint", "the engine")
    return {"context_fn": partial(_contexts, block, policy)}


def _contexts(
    block: nn.Module, policy: Callable[..., CheckpointPolicy]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return two context managers, for a block's first and second forward pass: the `context_fn` of
    `torch.utils.checkpoint`. `policy` says for an operation whether its result is kept.

    By default they are PyTorch's own selective checkpointing, which alone can be compiled. It
    counts every operation, and refuses one more in the second pass. With ZeRO, sub-layers, routers
    and experts are FSDP units within the block, and their hooks run operations or not, depending on
    what was prefetched, on the micro-batch before, and on what follows them in the block. Such a
    block runs eagerly, as hooks cannot be compiled, and gets `_Keeping` and `_Giving`, which count
    nothing.
    """
    if any(isinstance(module, FSDPModule) for module in block.modules()):
        results: _Results = defaultdict(deque)
        return _Keeping(policy, results), _Giving(results)
    first, second = create_selective_checkpoint_contexts(policy)
    return first, second


def _contexts_of_sharded(
    block: nn.Module, names: tuple[str, ...]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the `_contexts` of a block whose weights are DTensors, which keeps the results of
    operations with these `names`, and of _RANDOM_ATTENTION where it is compiled."""
    if torch.compiler.is_compiling():
        names += (_RANDOM_ATTENTION,)
    if not names:
        return nullcontext(), nullcontext()
    return _contexts(block, partial(_keep_named, names))


_Results = dict[Any, deque[Any]]
"""Kept results: maps an operation to the queue of its results, in the order in which it ran."""


class _Keeping(TorchDispatchMode):
    """Dispatch mode for a block's first forward pass: runs every operation, and puts the results of
    those that `policy` says to save into `results`. `_Giving` takes them out in the second pass."""

    def __init__(self, policy: Callable[..., CheckpointPolicy], results: _Results) -> None:
        super().__init__()
        self._policy, self._results = policy, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and return its result. If the policy says that results of this
        operation are saved, also keep it, detached from autograd."""
        result = func(*args, **(kwargs or {}))
        if self._policy(None, func) is CheckpointPolicy.MUST_SAVE:
            self._results[func].append(map_leaves(_detached, result))
        return result


class _Giving(TorchDispatchMode):
    """Dispatch mode for a block's second forward pass, in recomputation: an operation whose results
    `_Keeping` has put into `results` is not run again but returns the next of them. All others
    run."""

    def __init__(self, results: _Results) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the next result of this operation that the first forward pass has kept; run the
        operation if none was kept."""
        if func in self._results:
            return self._results[func].popleft()
        return func(*args, **(kwargs or {}))


def _detached(result: Any) -> Any:
    """Return a tensor detached from its autograd history; anything else is returned unchanged."""
    return result.detach() if isinstance(result, Tensor) else result


def _recomputed(forward: Forward, options: dict[str, Any], *arguments: Any, **named: Any) -> Tensor:
    """Run a block under `torch.utils.checkpoint`, and return its output. `forward` is the block's
    own, `arguments` and `named` are its arguments, `options` those of `checkpoint`. Without
    gradients, nothing is checkpointed. Shapes are the block's, (B, T, D) for the GPT."""
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return checkpoint(forward, *arguments, **options, **named)


def _keep_named(
    names: tuple[str, ...], ctx: Any, op: Any, *arguments: Any, **options: Any
) -> CheckpointPolicy:
    """Policy of selective checkpointing: save the results of operations whose names hold one of
    `names`, and recompute everything else."""
    if any(name in str(op) for name in names):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _keep_matmuls(ctx: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Policy of selective checkpointing: save the outputs of matmuls, attention and routing, and
    recompute everything else. Attention is matched by name, as it has one for each device (flash,
    efficient, cuDNN …); ring attention, attention that drops weights in kernels, and matmuls with
    sharded matrices are custom operations."""
    if op in _SAVED_MATMULS:
        return CheckpointPolicy.MUST_SAVE
    return _keep_named((*_SAVED_NAMES, *_ROUTING_NAMES), ctx, op)
