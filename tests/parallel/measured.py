"""Processes that train a step of a layout and say what they sent, or held."""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from ledger import BODIES, Ledger
from live_bytes import LiveBytes
from torch.utils._python_dispatch import TorchDispatchMode  # documented by this path

from pentameter.config.schema import Config
from pentameter.data.batches.step import Batch
from pentameter.model.experts import Experts
from pentameter.optim.build import build_optimizer
from pentameter.parallel.assemble import assemble
from pentameter.parallel.engine import Engine
from pentameter.parallel.experts.expert_parallel import ExpertExchange
from pentameter.parallel.links import measure_links
from pentameter.parallel.pipeline.bounded_stage import BoundedStage
from pentameter.parallel.waits import BucketSums, pass_on
from pentameter.planning.layouts.layout import parse_layout
from pentameter.planning.plan import Plan, make_plan
from pentameter.processes.failures.waiting import Wait, wait_behind
from pentameter.processes.group.world import World
from pentameter.train.update import update_weights

MODEL = {
    "vocab_size": 13,  # divides by neither 2 nor 4
    "context_length": 8,
    "n_layers": 4,
    "n_heads": 2,
    "d_model": 8,
    "d_ff": 12,
    "qkv_bias": True,
    "bias": True,
    "head_bias": True,
    "dropout": 0.1,
}
SECONDS = 120
MEETINGS = 10
"""Configurations that a process measures."""


def configuration(
    layout: str, model: dict[str, Any], train: dict[str, Any], lora: dict[str, Any] | None = None
) -> Config:
    degrees = parse_layout(layout).to_json()
    return Config.model_validate(
        {
            "model": {**MODEL, **model},
            "data": {"corpus": "grammar"},
            "train": {"batch_size": 8, "precision": "fp32", "compile": False, **train},
            "parallel": degrees,
            "lora": lora or {},
        }
    )


class Processes:
    """Processes that measure one configuration after another, each with one rank for life: DTensor
    remembers the places of a process on meshes that are equal. After some they are replaced: groups
    stay to the end of a process, and their idle threads wake up a hundred times a second."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._ranks: list[ProcessPoolExecutor] = []
        self._folder = tempfile.TemporaryDirectory()
        self._n_meetings = 0

    def close(self) -> None:
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        for rank in self._ranks:
            rank.shutdown(cancel_futures=True)
        self._ranks.clear()

    def run(self, size: int, work: Any, *arguments: Any) -> list[Any]:
        """What `work(world, *arguments)` returned in each of `size` processes, by rank."""
        if self._n_meetings % MEETINGS == 0:
            self._end()
        while len(self._ranks) < size:
            self._ranks.append(ProcessPoolExecutor(1, self._context))
        self._n_meetings += 1
        file = str(Path(self._folder.name) / f"meeting-{self._n_meetings}")
        asked = [
            process.submit(_in_world, file, rank, size, work, arguments)
            for rank, process in enumerate(self._ranks[:size])
        ]
        return [each.result(SECONDS) for each in asked]


def _in_world(file: str, rank: int, size: int, work: Any, arguments: Any) -> Any:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS / 2)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timeout
    )
    try:
        return work(World(rank, size, rank, size, timeout_seconds=SECONDS / 2), *arguments)
    finally:
        dist.destroy_process_group()


def own_batch(engine: Engine, step: int) -> Batch:
    """This process's rows of a random batch."""
    config = engine.plan.config
    generator = np.random.default_rng(step)
    shape = (engine.plan.batch_size, config.model.context_length + 1)
    tokens = generator.integers(0, config.model.vocab_size, shape)
    rows = engine.rows
    return Batch(tokens[rows, :-1], tokens[rows, 1:], rows)


def engine_of(world: World, config: Config) -> tuple[Plan, Engine]:
    plan = make_plan(config, world_size=world.size)
    precision = config.train.precision
    return plan, assemble(plan, torch.device("cpu"), precision, compiled=False, world=world)


def exchanges(engine: Engine) -> set[str]:
    """Names of the groups in which the experts' rows are exchanged."""
    modules = (module for model in engine.models for module in model.modules())
    found = (module.exchange for module in modules if isinstance(module, Experts))
    return {each.group_name for each in found if isinstance(each, ExpertExchange)}


@contextmanager
def constants(values: dict[str, Any]) -> Iterator[None]:
    patches = [patch(name, value) for name, value in values.items()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def sent(world: World, config: Config, changed: dict[str, Any]) -> dict[Any, Any]:
    """The ledger of a step, of this process."""
    with constants(changed):
        plan, engine = engine_of(world, config)
        ledger = Ledger(
            plan.layout, *engine.meshes, named=dict.fromkeys(exchanges(engine), "expert")
        )
        for step in range(3):  # DDP knows the order of gradients from the third on
            batch = own_batch(engine, step)
            with ledger if step == 2 else nullcontext():
                engine.forward_backward(batch, step)
                engine.gradient_norm()
            for parameter in engine.parameters():
                parameter.grad = None
    return dict(ledger.traffic)


def first_step(world: World, config: Config) -> tuple[int, list[tuple[int, set[str]]]]:
    """The most bytes of tensors in the first step of a pipeline, and of each of its stages then how
    many micro-batches' inputs and gradients PyTorch keeps, and on which devices buffers are."""
    made: list[BoundedStage] = []

    def recorded(stage: BoundedStage) -> None:
        made.append(stage)
        original(stage)

    original = BoundedStage.end_step
    with patch.object(BoundedStage, "end_step", recorded), LiveBytes() as live:
        _, engine = engine_of(world, config)
        engine.forward_backward(own_batch(engine, 0), 0)
    return live.most, [_receives(stage) for stage in made]


def _receives(stage: BoundedStage) -> tuple[int, set[str]]:
    every = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
    buffers = [one.buffer for each in every for one in each if hasattr(one, "buffer")]
    # The first stage's arguments have none; nor have receives between two steps, from 2.15 on.
    devices = {buffer.device.type for buffer in buffers if buffer is not None}
    return len(every), devices


def held(world: World, config: Config) -> dict[str, int]:
    """Bytes of tensors before a step, when there are gradients, and at the most."""
    with LiveBytes() as live:
        _, engine = engine_of(world, config)
        optimizer = build_optimizer(engine.named_parameters(), engine.plan.table, config.optimizer)
        for step in range(3):  # DDP's buckets are final from the third on
            live.watches = step == 2
            batch = own_batch(engine, step)
            before, live.most = live.now, 0
            loss = engine.forward_backward(batch, step)
            with_gradients = live.now
            update_weights(engine, optimizer, loss, 1e-3, 1.0, 1.0)
    return {"before": before, "with_gradients": with_gradients, "most": live.most}


class Failing(TorchDispatchMode):
    """Has the collective number `nth` within its `with` fail, as gloo's do when a rank does not
    answer."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self._left = nth

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name().partition("::")[2]
        if func.namespace == "pentameter" and name in BODIES:
            with self:
                return BODIES[name](*args)
        if func.namespace == "c10d":
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")
        return func(*args, **(kwargs or {}))


@contextmanager
def failing_bucket(nth: int) -> Iterator[None]:
    """Has DDP's all-reduce number `nth` within the `with` fail while it is under way."""
    start, left = BucketSums.start, itertools.count(-nth)

    def failing(sums: BucketSums, bucket: Any) -> Any:
        future = start(sums, bucket)
        if next(left) < 0:
            return future
        future.wait()
        failed: Any = torch.futures.Future()
        failed.set_exception(RuntimeError("Timed out waiting 3000ms for recv operation"))
        sums._started[-1] = (sums._started[-1][0], failed)
        return failed

    with patch.object(BucketSums, "start", failing):
        yield


def waits(
    world: World, config: Config, numbers: list[int], in_buckets: bool = False
) -> list[Wait | None]:
    """Where this process is said to wait when the collectives with these numbers in a step fail;
    None beyond the last. With `in_buckets` those of DDP alone are counted, which fail as they are
    waited for."""
    found = []
    for nth in numbers:
        _, engine = engine_of(world, config)  # a failure leaves the last one in no good order
        try:
            with failing_bucket(nth) if in_buckets else Failing(nth):
                engine.forward_backward(own_batch(engine, 0), 0)
                engine.gradient_norm()
        except RuntimeError as error:
            found.append(wait_behind(error, world.activity.naming, 1.5))
        else:
            found.append(None)
    return found


def health(world: World, config: Config, liar: int | None) -> tuple[dict[str, float], list[str]]:
    """What is measured of this process's links; what the rank `liar` sends has a wrong bit."""
    _, engine = engine_of(world, config)

    def lying(sent: torch.Tensor, *arguments: Any) -> torch.Tensor:
        damaged = sent.clone()
        damaged[5] ^= int(world.rank == liar)
        return pass_on(damaged, *arguments)

    with patch("pentameter.parallel.links.pass_on", lying):
        return measure_links(engine.mesh, engine.device)
