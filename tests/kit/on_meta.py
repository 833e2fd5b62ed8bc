"""Steps without a GPU that go as beside one: the model is on `meta`, and what would make the host
wait for the device raises, and so does what mixes tensors of the host with the device's.

Tensors on `meta` have shapes and no values. So nothing can be read from them, and a kernel that
would need to read one (`item`, `nonzero`, a mask as an index) raises. `Device` adds what `meta`
lets pass: operations on tensors of both, and copies to the device that a GPU would finish before
the host goes on. The ranks of a world are taken one by one: collectives of the backend `fake` send
nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ledger import BODIES
from torch import Tensor
from torch.distributed.pipelining import stage as pipelining
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

# PyTorch has no public world without other ranks; its own sharding tests use this one.
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode  # documented by this path

from pentameter.config.schema import Config
from pentameter.data.batches.step import Batch, evaluation_rows
from pentameter.optim.build import AnyOptimizer, JointOptimizer, build_optimizer
from pentameter.optim.sharded_muon import ShardedMuon
from pentameter.parallel.assemble import BUILT_IN, assemble
from pentameter.parallel.data_parallel import reshard
from pentameter.parallel.engine import BatchShard, Engine, LossSum
from pentameter.parallel.sources.gpt_source import GPTSource
from pentameter.parallel.sources.model_source import ModelSource
from pentameter.planning.plan import Plan, make_plan
from pentameter.processes.group.world import World
from pentameter.train import update
from pentameter.train.faults.guard import Guard
from pentameter.train.state import TrainState
from pentameter.train.update import Update, may_read_late, update_weights
from pentameter.tree import leaves, map_leaves
from trials.traced_rank import balance_exchanges

META = torch.device("meta")
COPIES = ("aten::_to_copy", "aten::copy_")
WITHOUT_NUMBERS = ("aten::cat", "aten::stack", "aten::index", "aten::index_put_", "aten::embedding")
"""Operations of which a GPU's refuse a 0-dim tensor of the host, or copy it to the device."""

TINY: dict[str, Any] = {
    "model.vocab_size": 32,
    "model.context_length": 16,
    "model.n_layers": 2,
    "model.d_model": 16,
    "model.attention.n_heads": 4,
    "train.steps": 10,
    "train.batch_size": 4,
    "train.micro_batch_size": 2,
}


class Waits(Exception):  # noqa: N818 - it says what the host does
    """The host would wait here until the device has computed all that came before."""


class Mixes(Exception):  # noqa: N818
    """An operation has tensors of the host and of the device."""


class Device(TorchDispatchMode):
    """Refuses operations that mix devices, and copies to the device for which the host waits; and
    counts what is read of the device: where groups of rows `end`, by the operation that reads
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # comes again as what a DTensor makes of it
        kwargs = kwargs or {}
        name = func._schema.name
        if func.namespace == "pentameter" and name.partition("::")[2] in BODIES:
            with self:  # `meta` would take its shapes alone
                return BODIES[name.partition("::")[2]](*args, **kwargs)
        tensors = [each for each in leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_host = [each for each in tensors if not each.is_meta]
        if name in COPIES:
            to = args[0].device if name == "aten::copy_" else kwargs.get("device")
            is_free = kwargs.get("non_blocking") or args[2:] == (True,)
            if to is not None and to.type == "meta" and on_host and not is_free:
                raise Waits(f"{name} of {tuple(on_host[0].shape)} to the device")
        elif name == "pentameter::ends_on_host":
            self.reads["ends"] += 1
        elif 0 < len(on_host) < len(tensors) and not _takes(func, on_host):
            mixed = ", ".join(f"{tuple(each.shape)} on {each.device}" for each in tensors)
            raise Mixes(f"{name} of {mixed}")
        return func(*args, **kwargs)


def _takes(operation: Any, on_host: Sequence[Tensor]) -> bool:
    """Whether an operation on tensors of the device takes these of the host: numbers, and what it
    says that it reads there."""
    if torch.Tag.cudagraph_unsafe in operation.tags and operation.namespace == "pentameter":
        return True
    return operation._schema.name not in WITHOUT_NUMBERS and not any(x.dim() for x in on_host)


class Making(TorchFunctionMode):
    """Refuses to make a tensor on the device from Python's numbers, for whose copy the host
    waits."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_made = func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None
        if is_made and torch.device(kwargs["device"]).type == "meta":
            raise Waits(f"{func.__name__} of {args[0]!r} on the device")
        return func(*args, **kwargs)


class _Stream(torch.cpu.Stream):
    """A stream on which nothing runs."""

    def record_event(self) -> torch.cpu.Event:
        return torch.cpu.Event()


STREAMS = SimpleNamespace(
    **{
        **vars(torch.cpu),
        "Stream": _Stream,
        "current_stream": _Stream,
        "stream": contextlib.nullcontext,
        "current_device": lambda: None,
    }
)
"""What PyTorch finds as the module of the device, as `torch.cuda` is that of `cuda`."""


@contextlib.contextmanager
def simulated_gpu() -> Iterator[None]:
    """Context manager: `meta` has what the package and PyTorch ask of a GPU. Its host waits for it,
    processes exchange its tensors, streams and autocast are there and do nothing."""
    real_autocast, real_enabled = torch.autocast, torch.is_autocast_enabled

    def autocast(device: str, *args: Any, **options: Any) -> Any:
        if device == "meta":
            return contextlib.nullcontext()
        return real_autocast(device, *args, **options)

    def is_autocast_enabled(device: str) -> bool:
        return device != "meta" and real_enabled(device)

    def copy(shard: BatchShard, tensor: Tensor) -> Tensor:
        return tensor.to(shard.device, non_blocking=True)  # as from pinned memory

    def warm_up(schedule: Any, stages: Any, *_: Any) -> None:
        # From 2.13 on PyTorch's stages vote on this before their first step, and the host waits.
        for stage in stages:
            stage._inference_mode = pipelining.InferenceMode.STATIC

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", autocast)
        patch.setattr(torch, "is_autocast_enabled", is_autocast_enabled)
        patch.setattr(Engine, "host_waits", True)
        patch.setattr(BatchShard, "_copy", copy)
        patch.setattr("pentameter.parallel.mesh.EXCHANGES", ("meta",))
        patch.setattr(torch, "meta", STREAMS, raising=False)
        patch.setattr(  # else FSDP wants memory
            "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
            "._validate_no_meta_params",
            lambda group: None,
        )
        if hasattr(_PipelineSchedule, "_warmup_p2p"):
            patch.setattr(_PipelineSchedule, "_warmup_p2p", warm_up)
        yield


@contextlib.contextmanager
def rank_of(plan: Plan, rank: int) -> Iterator[World]:
    """Context manager: this process is one rank of the plan's layout, whose other ranks do not
    exist."""
    n_ranks = plan.layout.world_size
    if n_ranks == 1 and not plan.layout.zero:
        yield World()
        return
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=n_ranks)
    try:
        yield World(rank, n_ranks, timeout_seconds=600.0)
    finally:
        dist.destroy_process_group()


def config_of(settings: Mapping[str, Any]) -> Config:
    """The configuration of a tiny GPT with these settings, dotted path → value."""
    tree: dict[str, Any] = {"data": {"corpus": "grammar"}}
    for path, value in {**TINY, **settings}.items():
        *sections, key = path.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return Config.model_validate(tree)


def tokens_of(config: Config) -> Batch:
    """A step's batch of tokens, each of which has a target."""
    n_rows, T = config.train.batch_size, config.model.context_length
    assert n_rows is not None
    tokens = np.zeros((n_rows, T), dtype=np.int64)
    return Batch(tokens, tokens, np.arange(n_rows))


def run_step(
    config: Config,
    rank: int = 0,
    *,
    batch: Batch | None = None,
    source: ModelSource = BUILT_IN,
    **forms: Any,
) -> dict[str, int]:
    """Build one rank's engine on `meta`, and run a step and the evaluations there, as the trainer
    does. Returns how often the host has waited in the step, and for what: its `numbers`, or the
    `ends` of experts' rows.

    rank: which one; -1 is the last. batch: all rows of the step's batch; tokens if None. source:
    where the model comes from. forms: what a GPU computes in other ways than the plain ones, as
    for `assemble`.
    """
    plan = make_plan(config, outline_of=source.outline)
    precision = config.train.precision.replace("auto", "fp32")
    whole = batch or tokens_of(config)
    with simulated_gpu(), rank_of(plan, rank % plan.layout.world_size) as world:
        engine = assemble(
            plan, META, precision,
            compiled=False, world=world, source=source, **forms,
        )  # fmt: skip
        for model in engine.models:
            balance_exchanges(model)
        named = list(engine.named_parameters())
        optimizer = build_optimizer(named, plan.table, config.optimizer, ShardedMuon)
        _fuse(optimizer)
        late = may_read_late(engine, optimizer)
        spikes = config.guard.spike_factor is not None
        guard = Guard(config.guard, TrainState(), META, halts=late) if spikes else None
        own = Batch(
            *(map_leaves(itemgetter(engine.rows), x) for x in (whole.inputs, whole.targets)),
            engine.rows,
        )
        with Device() as device, Making(), _reading(device.reads):
            scale = 2.0**16 if precision == "fp16" else 1.0
            loss = engine.forward_backward(own, 3, loss_scale=scale)
            update_weights(
                engine, optimizer, loss, 1e-3, scale, 1.0,
                at_once=not late, with_loads=True, guard=guard,
            )  # fmt: skip
            waited = dict(device.reads)
            engine.evaluate(whole)
            _rows_and_logits(engine, whole)
    return waited


def read_by_experts(config: Config) -> dict[str, int]:
    """What the host must read in a step for experts that are all on each rank, multiplied one after
    another: where their rows end, once a layer and micro-batch."""
    n_layers = sum(map(config.model.experts.are_in, range(config.model.n_layers)))
    is_here = config.parallel.expert == config.parallel.expert_tensor == 1
    return {"ends": n_layers * make_plan(config).n_micro_batches} if n_layers and is_here else {}


def _fuse(optimizer: AnyOptimizer) -> None:
    """Have Adam's update be the fused one, as on a GPU. PyTorch has its shapes for `meta`, but does
    not list it among the devices that have it, so the state is made here."""
    parts = optimizer.parts if isinstance(optimizer, JointOptimizer) else [optimizer]
    for part in parts:
        for group in part.param_groups if isinstance(part, torch.optim.Adam) else ():
            group["fused"] = True
            for each in group["params"]:
                moments = {name: torch.zeros_like(each) for name in ("exp_avg", "exp_avg_sq")}
                part.state[each] = {"step": torch.zeros((), device=each.device), **moments}


@contextlib.contextmanager
def _reading(reads: Counter[str]) -> Iterator[None]:
    """Context manager: the host reads a step's `numbers`, which are all 1, and `reads` counts
    that."""

    def read(updates: Sequence[Update]) -> list[Update]:
        reads["numbers"] += 1
        return [Update(LossSum(1.0, 1), 1.0) for _ in updates]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "read", read)
        yield


@torch.no_grad()
def _rows_and_logits(engine: Engine, batch: Batch) -> None:
    """Compute losses by row and logits, which the host would read."""
    own = evaluation_rows(batch, engine.plan.layout, engine.world.rank)
    inputs, targets = engine._shard.tensors(own)
    if isinstance(engine.source, GPTSource):
        engine._stages.row_losses(inputs, targets)
        engine._stages.logits(inputs)
    reshard(engine._wrapped.values(), engine.plan.layout)
