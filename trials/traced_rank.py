"""One rank in a layout, built on fake tensors that take no memory, to check the planner's bytes:
its parameters, their gradients and one micro-batch's activations are counted and compared.

    python -m trials.traced_rank gpt3-175b data=8,tensor=8,pipeline=16 777
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn

# PyTorch has no public tensors without memory that keep their device, nor a public process group
# that stands in for missing ranks. Its own sharding tests, and torchtitan's memory estimates, use
# these.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode  # documented by this path

from pentameter.config.files.load import load_config
from pentameter.data.sizes import data_sizes
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.costs import ActivationBytes, Step
from pentameter.estimating.bytes.stages import stage_tables
from pentameter.model.experts import Experts
from pentameter.parallel.data_parallel import micro_batch, shard_state
from pentameter.parallel.experts.expert_parallel import ExpertExchange
from pentameter.parallel.local_shards import local_shard
from pentameter.parallel.memory.rounded_weights import RoundedWeights
from pentameter.parallel.mesh import Mesh, build_mesh
from pentameter.parallel.precision import arithmetic
from pentameter.parallel.sources.gpt_source import GPTSource
from pentameter.parallel.sources.tied_parameters import tie_again, tied_names
from pentameter.parallel.stage_module import StageModule
from pentameter.planning.adapters import run_operations
from pentameter.planning.layouts.layout import layout_overrides
from pentameter.planning.plan import Plan, make_plan
from pentameter.processes.group.world import World
from pentameter.tree import leaves


@dataclass(frozen=True)
class TracedRank:
    """The bytes that one rank holds, as counted on fake tensors and as planned."""

    rank: int
    traced: Mapping[str, int]
    """Parameter name → bytes on this rank in the modules that were built."""
    gradients: Mapping[str, int]
    """Name of a trained parameter → bytes of its gradient on this rank, as the optimizer finds
    it."""
    trained: frozenset[str]
    """Names of the parameters on this rank that training updates by a gradient."""
    planned: Mapping[str, int]
    """Parameter name → bytes on this rank under the Plan's layout."""
    activations: int
    """Bytes that one micro-batch's forward passes save for the backward passes, in all stages on
    the rank, including the residual stream passed to the next stage or to the head."""
    planned_activations: int
    """Bytes that the planner estimates for `activations`."""

    @property
    def differing(self) -> list[str]:
        """Names of the parameters whose traced, gradient and planned bytes are not all equal, a
        missing one included; one that is not trained has no gradient."""
        expected = {name: n for name, n in self.planned.items() if name in self.trained}
        return sorted(
            name
            for name in {*self.traced, *self.gradients, *self.planned}
            if self.traced.get(name) != self.planned.get(name)
            or self.gradients.get(name) != expected.get(name)
        )

    def __str__(self) -> str:
        traced, planned = sum(self.traced.values()), sum(self.planned.values())
        verdict = "equal, one by one; so are their gradients, and each of AdamW's moments"
        if self.differing:
            verdict = f"differing: {', '.join(self.differing[:5])}"
        ratio = self.activations / max(1, self.planned_activations)
        return (
            f"rank {self.rank}: {len(self.traced)} parameters of {traced:,} bytes built, "
            f"{planned:,} planned: {verdict}\n"
            f"activations of a micro-batch: {self.activations:,} bytes traced, "
            f"{self.planned_activations:,} planned ({ratio:.3f} ×)"
        )


def trace_rank(plan: Plan, rank: int, precision: str) -> TracedRank:
    """Build rank `rank`'s shard of the model on fake tensors, run one micro-batch through it, and
    return its bytes beside those of `plan` (a run's layout, parameters and batch sizes).

    No other process is needed: the process group has the layout's full size, but its other ranks do
    not exist. It is initialized here and destroyed at the end, so none may exist before. Ranks that
    exchange rows for experts get equally many. precision: a resolved `train.precision` (`bf16`),
    not `auto`. Raises ConfigError for a rank outside the layout.
    """
    layout = plan.layout
    if not 0 <= rank < layout.world_size:
        raise ConfigError(
            f"rank {rank} is not in 0 … {layout.world_size - 1} of the layout {layout}"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        world = World(rank, layout.world_size, timeout_seconds=600.0)
        return _trace(plan, precision, build_mesh(layout, "cpu", world))
    finally:
        dist.destroy_process_group()


def _trace(plan: Plan, precision: str, mesh: Mesh) -> TracedRank:
    """Trace the rank that `mesh` describes, one pipeline stage after another, and return its bytes,
    traced and planned. precision: a resolved `train.precision`."""
    layout, rank = plan.layout, mesh.world.rank
    costs = ActivationBytes(Step(plan.config, layout, plan.stages, precision))
    parameters: dict[str, int] = {}
    gradients: dict[str, int] = {}
    activations = planned = 0
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    for number in layout.stages_of(mesh.coordinates["pipeline"]):
        model_slice = GPTSource().stage(plan, number, mesh, arithmetic(precision))
        with fake:
            _replace_meta_parameters(model_slice.model)
        balance_exchanges(model_slice.model)
        # As `assemble` does, outside fake mode: the meshes' tensors are real.
        module = StageModule(model_slice, torch.device("cpu"), arithmetic(precision))
        if mesh.parameters is not None:
            shard_state(module, mesh, plan, offload=False)
        _count(parameters, module.model.named_parameters())
        with fake:
            activations += _step(module, plan, number)
        _count(
            gradients, ((n, p.grad) for n, p in module.model.named_parameters() if p.requires_grad)
        )
        run = run_operations(plan.config.model, plan.config.lora, plan.stages[number])
        planned += costs.stage([op for op in run if op.kind != "head"]) + costs.stream
    held = _planned(plan, rank, precision)
    trained = frozenset(spec.name for spec in plan.table if spec.is_trained) & held.keys()
    return TracedRank(rank, parameters, gradients, trained, held, activations, planned)


@dataclass
class _EvenExchange(ExpertExchange):
    """An exchange whose rows are the same number for each rank that holds different experts, since
    fake tensors have no values to count."""

    def counted(self, n_rows: int, ends: Tensor) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Return (rows received for each expert here, without values, (n, e); the index after each
        expert's last, without values, (e,); rows sent to each rank; rows received from each), for
        `n_rows` and the indices `ends` (E,)."""
        n_groups = self.n_ranks // self.n_shards
        least, more = divmod(n_rows, n_groups)
        sent = [least + (number < more) for number in range(n_groups) for _ in range(self.n_shards)]
        received = ends.new_empty(self.n_ranks, len(ends) // n_groups)
        own_ends = received.new_empty(received.shape[1], device="cpu")
        return received, own_ends, sent, [sent[0]] * self.n_ranks


def balance_exchanges(module: nn.Module) -> None:
    """Have the layers of sharded experts in a module exchange equally many rows with each rank, in
    place."""
    for each in module.modules():
        if isinstance(each, Experts) and isinstance(each.exchange, ExpertExchange):
            each.exchange = _EvenExchange(each.exchange.group_name, each.exchange.n_shards)


def _replace_meta_parameters(module: nn.Module) -> None:
    """Replace a module's meta parameters by CPU ones, in place, so that operations are dispatched
    as on a CPU. Call it in fake mode, which gives them no memory. Tied parameters stay tied."""
    shared = tied_names(module)
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            fake = torch.empty_like(parameter, device="cpu")
            setattr(owner, name, nn.Parameter(fake, parameter.requires_grad))
    tie_again(module, shared)


def _step(module: StageModule, plan: Plan, number: int) -> int:
    """Run one micro-batch's forward and backward pass through `module`, pipeline stage `number`, in
    fake mode. Return the bytes that its forward pass saves on this rank, including the residual
    stream passed to the next stage or to the head."""
    config, layout = plan.config, plan.layout
    shape = (plan.micro_batch_size, config.model.context_length // layout.context)
    tokens = torch.zeros(shape, dtype=torch.int64)
    rows = np.arange(plan.micro_batch_size)
    keys = GPTSource().row_keys(plan, 0, rows, rows)
    kept = 0
    dtype = module.arithmetic.autocast_dtype
    rounded = RoundedWeights()
    if plan.rounds_once and dtype is not None:
        rounded = RoundedWeights(module.units, dtype)
    with rounded, _NewStorages() as new:

        def note(*_: object) -> None:
            nonlocal kept
            torch.clear_autocast_cache()  # drop cached rounded weights that no saved tensor needs
            kept = new.n_bytes

        head = getattr(module.model, "head_loss", None)
        if head is not None:
            head.register_forward_pre_hook(note, prepend=True)
        x = tokens
        if number > 0:
            stream = (config.model.context_length, config.model.d_model)
            local = plan.sharding.local_shape(stream, ("time", "embed"))
            dtype = module.arithmetic.weights
            x = torch.zeros((shape[0], *local), dtype=dtype, requires_grad=True)
        with micro_batch(module, plan.rules, is_last=True):
            y = module(x, tokens, keys)
            if head is None:
                note()
            y.sum().backward()
    return kept


class _NewStorages(TorchDispatchMode):
    """Context manager that tracks the live storages that operations create within its block, except
    those in which FSDP gathers and reduces."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: WeakSet[UntypedStorage] = WeakSet()

    @property
    def n_bytes(self) -> int:
        """Total bytes in the tracked storages that are still alive."""
        return sum(storage.nbytes() for storage in self._alive)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, and track the storages of its results that were not among its arguments'."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # dispatched again for the DTensor's local operations
        given = set(_storages((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        self._alive.update(each for each in _storages(result) if each not in given)
        if func.namespace == "fsdp":
            self._alive.difference_update(given)
        return result


def _storages(found: Any) -> Iterator[UntypedStorage]:
    """Return the storages of all tensors in `found`, arguments or results nested in any way."""
    return (leaf.untyped_storage() for leaf in leaves(found) if isinstance(leaf, Tensor))


def _count(found: dict[str, int], named: Iterator[tuple[str, Tensor | None]]) -> None:
    """Add an entry to `found`, in place, for each (name, tensor) in `named`: name → bytes in the
    tensor's local shard. A tensor that is None is skipped, and a name that `found` already has (a
    weight tied across stages) is not counted again."""
    for name, tensor in named:
        if tensor is not None:
            local, _ = local_shard(tensor)
            found.setdefault(name, local.numel() * local.element_size())


def _planned(plan: Plan, rank: int, precision: str) -> dict[str, int]:
    """Return parameter name → bytes on `rank`, computed from the plan's shapes and the dtype that
    weights have in `precision`, without building a model."""
    layout = plan.layout
    coordinates = layout.parameter_coordinates(rank)
    n_bytes = arithmetic(precision).weights.itemsize
    tables = stage_tables(plan.config, layout, plan.stages, coordinates["pipeline"])
    found = {}
    for _, table in tables:
        for spec in table:
            found[spec.name] = plan.sharding.zero_elements(spec, coordinates) * n_bytes
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a preset or a TOML file")
    parser.add_argument("layout", help="such as data=2,tensor=2")
    parser.add_argument("rank", type=int)
    parser.add_argument("--precision", default="bf16")
    asked = parser.parse_args()
    config = load_config(asked.source, layout_overrides(asked.layout))
    sizes = data_sizes(config)
    plan = make_plan(config, sizes.vocab_size, sizes.rows_per_epoch)
    print(trace_rank(plan, asked.rank, asked.precision))


if __name__ == "__main__":
    main()
