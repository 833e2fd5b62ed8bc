"""Computation of a case's steps in a worker process, by the same code that trains."""

from __future__ import annotations

import gc
import math
import pkgutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from pentameter.config.schema import Config
from pentameter.data.batches.step import Batch
from pentameter.errors import ConfigError
from pentameter.keyed import bits, make_key
from pentameter.model import loss
from pentameter.model.initial import fill
from pentameter.optim.build import build_optimizer
from pentameter.optim.sharded_muon import ShardedMuon
from pentameter.parallel.assemble import assemble
from pentameter.parallel.context import ring_attention
from pentameter.parallel.engine import Engine
from pentameter.parallel.local_shards import local_shard
from pentameter.parallel.sources.gpt_source import GPTSource
from pentameter.parallel.sources.model_source import ModelSource
from pentameter.planning.adapters import is_of_adapter
from pentameter.planning.architecture import IGNORED_TARGET, Init, ParameterSpec
from pentameter.planning.plan import Plan, make_plan
from pentameter.processes.failures.failure import LostProcessError
from pentameter.processes.group.join import joined_world
from pentameter.processes.group.rank import LaunchedRank
from pentameter.processes.group.world import World
from pentameter.train.update import update_weights
from pentameter.train.user_components import BatchFunction, CustomBatches
from pentameter.tree import leaves
from pentameter.verify.jobs import Failed, Float64, Job, StepNumbers

INIT_STD = 0.3
"""Standard deviation of every initial parameter: with widths of ten, activations and gradients stay
near 1."""
SMALL_BLOCKS = {(ring_attention, "TILE"): 3, (loss, "MAX_LOGITS"): 100}
"""(Module, name) of a constant, the size above which something is computed in blocks → a value so
small that verify's steps need several blocks."""
OWN_NOISE = 0.05
"""Standard deviation of the noise added to a custom model's initial weights, whose scale the model
itself knows best."""


def answer(job: Job) -> list[StepNumbers] | Failed:
    """Run one rank's job in a worker: return its numbers for each step, or a Failed with the
    exception. Collective over the job's ranks."""
    gc.collect()  # the last case's groups, meshes and modules refer to each other
    size, where = job.world_size, f"file://{job.rendezvous_file}"
    launched = LaunchedRank(job.rank, size, job.rank, size, where, "verify")
    has_group = job.config.parallel.zero > 0
    try:
        if job.prepare is not None:
            pkgutil.resolve_name(job.prepare)()
        with (
            several_blocks() if job.small_blocks else nullcontext(),
            joined_world(
                "cpu", launched, always_group=has_group, timeout_seconds=job.timeout_seconds
            ) as world,
        ):
            source, batches = (GPTSource(), None) if job.model is None else job.model.received()
            return list(compute_steps(job.config, job.n_steps, world, source, batches))
    except BaseException as error:
        last = traceback.format_exception_only(error)[-1].strip()
        return Failed(last, traceback.format_exc(), isinstance(error, LostProcessError))


def compute_steps(
    config: Config,
    n_steps: int,
    world: World,
    source: ModelSource,
    batches: BatchFunction | None = None,
) -> Iterator[StepNumbers]:
    """Train `n_steps` steps under the configuration's layout from random weights, and yield this
    rank's numbers for each. Collective over the world.

    source: the model (its functions that build and shard it). batches: a user's batch function;
    None for random tokens.
    """
    plan = make_plan(config, world_size=world.size, outline_of=source.outline)
    # With a bias that starts at zero, adding it twice would go unnoticed.
    noisy = replace(plan, table=tuple(replace(s, init=_noise(s, config)) for s in plan.table))
    engine = assemble(
        noisy, torch.device("cpu"), "fp64", compiled=False, world=world, source=source
    )
    if config.train.compile is True:
        for module in engine.stage_modules:
            module.run_captured()
    if plan.built_by is None:
        _add_ones(engine, plan)
    else:
        _add_noise(engine, plan)
    rules = config.optimizer
    optimizer = build_optimizer(engine.named_parameters(), plan.table, rules, ShardedMuon)
    # A number of batch rows that neither data-parallel ranks nor micro-batches divide.
    some = np.arange(plan.batch_size // 2 + 1)
    batch_of: Callable[[int, np.ndarray], Batch] = partial(_made_up_rows, plan)
    if batches is not None:
        custom = CustomBatches(batches, plan.config, plan.vocab_size_padded, source)
        batch_of = custom.batch
        if any(array.dtype.kind not in "iu" for array in leaves(batch_of(0, some).targets)):
            some = np.arange(plan.batch_size)  # these targets have no value for a missing row
    if plan.built_by is not None and world.size == 1:
        _refuse_draws(engine, plan.built_by, batch_of(0, engine.rows))
    for step in range(n_steps):
        trained = engine.forward_backward(batch_of(step, engine.rows), step)
        gradients = {
            name: _full_tensor(gradient)
            for name, p in engine.named_parameters()
            if (gradient := _gradient(p)) is not None
        }
        update = update_weights(
            engine, optimizer, trained, rules.learning_rate, 1.0, rules.clip_norm
        )
        weights = {name: _full_tensor(p) for name, p in engine.named_parameters()}
        evaluated = engine.evaluate(batch_of(step, some))
        norm = float(update.grad_norm)
        found = StepNumbers(trained.mean, gradients, norm, weights, evaluated.mean)
        if step == n_steps - 1 and plan.built_by is None:
            row_losses, next_logits = _read_in_other_ways(engine, batch_of(step, some))
            found = replace(found, row_losses=row_losses, next_logits=next_logits)
        yield found


def _refuse_draws(engine: Engine, built_by: str, batch: Batch) -> None:
    """Raise ConfigError if a custom model draws random numbers in training, which differ from
    layout to layout: the loss of the same batch then depends on the step that seeds them."""
    first, second = (engine.forward_backward(batch, step).mean for step in (0, 1))
    engine.zero_gradients()
    if first != second:
        raise ConfigError(
            f"the module that {built_by} builds draws random numbers in training, such as a "
            "dropout's, which differ from layout to layout; take its rate from "
            "config.model.dropout, which is 0 here"
        )


def _read_in_other_ways(engine: Engine, batch: Batch) -> tuple[Float64, Float64]:
    """Return two further results that runs compute from batch rows, so that they are compared too:
    the loss of each row (B,), and the logits (1, V) that follow the first row. For this, all rows
    are truncated in the middle. Collective."""
    n_seen = batch.inputs.shape[1] // 2 + 1
    targets = batch.targets.copy()
    targets[:, n_seen:] = IGNORED_TARGET
    row_losses = engine.row_losses(replace(batch, targets=targets))
    return row_losses, engine.next_logits(batch.inputs[:1, :n_seen])


@contextmanager
def several_blocks() -> Iterator[None]:
    """Context manager: within it, in this process, whatever is computed in blocks above some size
    (the loss, for example) has that size set so low that `verify`'s small tensors consist of
    several blocks, the last one smaller. The one process that layouts are compared with computes
    each in one block."""
    before = [(module, name, getattr(module, name)) for module, name in SMALL_BLOCKS]
    try:
        for (module, name), limit in SMALL_BLOCKS.items():
            setattr(module, name, limit)
        yield
    finally:
        for module, name, limit in before:
            setattr(module, name, limit)


def made_up_batch(plan: Plan, step: int) -> Batch:
    """Return the global batch of random tokens for `step`, a function of the plan's seed: inputs
    (B, T) and targets (B, T).

    Some targets do not count and are -1: all behind a random position in each row, a quarter of
    those before it, and all targets of one row in each step.
    """
    B, T = plan.batch_size, plan.config.model.context_length
    vocab_size = plan.config.model.vocab_size
    assert vocab_size is not None  # resolved
    counters = np.arange(B * (T + 2), dtype=np.int32)
    words = bits(make_key(plan.config.seed, "verify", step), counters).view(np.uint32)
    words = words.reshape(B, T + 2)
    tokens = (words[:, : T + 1] % vocab_size).astype(np.int64)
    n_targets = 1 + words[:, T + 1 :] % T
    n_targets[step % B] = 0
    counts = (np.arange(T) < n_targets) & (words[:, :T] >> 30 > 0)
    targets = np.where(counts, tokens[:, 1:], IGNORED_TARGET)
    return Batch(tokens[:, :-1].copy(), targets, np.arange(B, dtype=np.int64))


def _made_up_rows(plan: Plan, step: int, rows: np.ndarray) -> Batch:
    batch = made_up_batch(plan, step)
    return Batch(batch.inputs[rows], batch.targets[rows], batch.rows[rows])


def _noise(spec: ParameterSpec, config: Config) -> Init:
    """Return the kind and scale of one parameter's random initial values in verified steps: normal
    with deviation INIT_STD, except for adapters.

    The deviation of an adapter's matrices A and B is chosen so that what they add to a weight,
    factor · B A, has the deviation INIT_STD. With INIT_STD for the matrices themselves, attention's
    scores would saturate, and each layer would multiply the rounding of those below it
    (docs/decisions.md).
    """
    if not is_of_adapter(spec):
        return Init("normal", INIT_STD)
    assert config.lora.rank is not None
    n_added = math.sqrt(config.lora.rank)
    return Init("normal", math.sqrt(INIT_STD / config.lora.factor / n_added))


def _add_ones(engine: Engine, plan: Plan) -> None:
    """Add 1 in place to the weights that begin at 1 in training (those of norms), so that here they
    vary around 1."""
    ones = {spec.name for spec in plan.table if spec.init.kind == "ones"}
    with torch.no_grad():
        for name, parameter in engine.named_parameters():
            if name in ones:
                parameter.add_(1.0)


def _add_noise(engine: Engine, plan: Plan) -> None:
    """Add keyed noise with deviation OWN_NOISE to a custom model's weights, in place; the same
    noise on every layout."""
    specs = {spec.name: replace(spec, init=Init("normal", OWN_NOISE)) for spec in plan.table}
    with torch.no_grad():
        for name, parameter in engine.named_parameters():
            local, offset = local_shard(parameter)
            if local.ndim:
                sides = zip(offset, local.shape, strict=True)
                noise = torch.empty_like(local)
                region = tuple((start, start + size) for start, size in sides)
                fill(specs[name], noise, region, plan.config.seed)
                local.add_(noise)


def _gradient(parameter: Parameter) -> Tensor | None:
    """Return a parameter's gradient, None if it has none. A trained DTensor without a gradient
    gives NaN instead: the ranks that hold its other shards may have gradients, and all must take
    part in gathering them."""
    is_shard = isinstance(parameter, DTensor) and parameter.requires_grad
    if parameter.grad is None and is_shard:
        return torch.full_like(parameter, math.nan)
    return parameter.grad


def _full_tensor(tensor: Tensor) -> Float64:
    """Return the whole tensor as a numpy float64 array, gathered if it is sharded over
    ranks. Collective."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.numpy().copy()
