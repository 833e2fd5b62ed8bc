"""Computation of a run's steps again, from a checkpoint, on any layout: with the same batches,
learning rates and dropout, and the guard's decisions. Nothing is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from pentameter.checkpoint.folders.opening import Checkpoint
from pentameter.config.schema import ScheduleConfig
from pentameter.errors import ConfigError, CorruptError, few
from pentameter.optim.build import AnyOptimizer, JointOptimizer
from pentameter.optim.schedule import learning_rate
from pentameter.parallel.engine import Engine
from pentameter.parallel.local_shards import local_shard
from pentameter.planning.plan import Plan
from pentameter.processes.group.world import World
from pentameter.record.run_data import RunData
from pentameter.replay.record import RunRecord, StepNumbers
from pentameter.train.checked_graphs import refuse_wrong_graphs
from pentameter.train.compute import Compute
from pentameter.train.faults.guard import Guard
from pentameter.train.faults.row_losses import HighestRows, highest_rows
from pentameter.train.keep.saving import load_tensors, tensors_to_save
from pentameter.train.start import build_engine
from pentameter.train.state import TrainState, saved_state
from pentameter.train.update import read, update_weights
from pentameter.train.user_components import UserComponents


@dataclass(frozen=True)
class WeightsCompared:
    """Difference between the weights and optimizer state after replayed steps and those that the
    run saved."""

    step: int
    n_tensors: int
    different: tuple[str, ...]
    """Names of the tensors whose bits differ."""
    weights_distance: float
    """Euclidean distance between replayed and saved weights ÷ distance between the saved weights
    and those before the steps."""
    optimizer_distance: float
    """Euclidean distance between replayed and saved optimizer state ÷ norm of the saved one."""

    @property
    def is_equal(self) -> bool:
        """True if all tensors have the same bits."""
        return not self.different

    def __str__(self) -> str:
        if self.is_equal:
            return f"all {self.n_tensors} tensors equal to the bit"
        return (
            f"{len(self.different)} of {self.n_tensors} tensors differ ({few(self.different)}); "
            f"the weights by {self.weights_distance:.2g} of the way that they went, the "
            f"optimizer's state by {self.optimizer_distance:.2g} of its norm"
        )


@dataclass(frozen=True)
class Replayed:
    """Result of a replay. `numbers`: step → the numbers computed again. `weights`: how the weights
    at the end compare with those that the run saved; None if it saved none there."""

    numbers: Mapping[int, StepNumbers]
    weights: WeightsCompared | None


@dataclass(eq=False)
class Replay:
    """Computes steps of a recorded run again, by an engine built like the run's. Every method is
    collective."""

    record: RunRecord
    data: RunData
    plan: Plan
    """The layout and the kind of computation, with `compute`."""
    compute: Compute
    world: World
    base: Checkpoint | None
    """The checkpoint to begin with; None for the initial weights."""
    schedules: Mapping[int, ScheduleConfig]
    """Step → the schedule by which the run made it."""

    def __post_init__(self) -> None:
        built = build_engine(self.plan, self.compute, self.world, UserComponents())
        self._engine, self._optimizer = built
        refuse_wrong_graphs(self._engine, self.data.batches, 0)  # as the run did

    def highest_rows(self, step: int) -> HighestRows:
        """Return the rows with the highest loss in the batch of `step`, computed with the engine's
        present weights."""
        tokenizer = self.data.dataset.tokenizer
        return highest_rows(self._engine, self.data.batches, tokenizer, step)

    def run(
        self,
        steps: Sequence[int],
        saved: Checkpoint | None,
        before_step: Callable[[int], None] = lambda _: None,
    ) -> Replayed:
        """Begin with `base`, make `steps`, and compare the weights with the checkpoint `saved`, if
        that is given. `before_step` is called with the number of each step before it is made."""
        state = self._begin()
        guard = None
        if self.plan.config.guard.spike_factor is not None:
            device = self._engine.device if self._engine.host_waits else torch.device("cpu")
            guard = Guard(self.plan.config.guard, state, device, halts=False)
        before = {} if saved is None else self._weights()
        numbers = {}
        for step in steps:
            before_step(step)
            numbers[step] = self._make(step, state, guard)
        weights = None
        if saved is not None:
            weights = _compared(self._engine, self._optimizer, saved, before, self.world)
        return Replayed(numbers, weights)

    def _begin(self) -> TrainState:
        """Load the weights and the optimizer's state with which the replay begins. Return the rest
        of the training state."""
        if self.base is not None:
            load_tensors(self._engine, self._optimizer, self.base, self.world)
            return saved_state(self.base)[0]
        optimizer = self._optimizer
        for part in optimizer.parts if isinstance(optimizer, JointOptimizer) else (optimizer,):
            part.state.clear()
        layout = self.plan.layout
        stages = layout.stages_of(layout.coordinates(self.world.rank)["pipeline"])
        models = dict(zip(stages, self._engine.models, strict=True))
        self._engine.source.initialize(models, self.plan)
        return TrainState()

    def _make(self, step: int, state: TrainState, guard: Guard | None) -> StepNumbers:
        """Make one optimizer step, number `step`, as the training loop does, and return its loss,
        gradient norm and whether the update was made. In fp16 the loss scale in `state` is updated.
        `guard` decides which updates are left out, None leaves out only those with a number that is
        not finite."""
        engine, index = self._engine, step - 1
        is_fp16 = self.compute.precision == "fp16"
        scale = state.loss_scale.scale if is_fp16 else 1.0
        batch = self.data.batches.batch(index, engine.rows)
        loss = engine.forward_backward(batch, index, loss_scale=scale)
        clip_norm = self.plan.config.optimizer.clip_norm
        update = update_weights(
            engine, self._optimizer, loss, self._rate(step), scale, clip_norm, guard=guard
        )
        (update,) = read([update])
        if is_fp16:
            state.loss_scale.update(finite=update.is_finite)
        return StepNumbers(update.loss.mean, float(update.grad_norm), update.made)

    def _rate(self, step: int) -> float:
        """Return the step's learning rate. Raises ConfigError if the run recorded another one."""
        rate = learning_rate(step - 1, self.plan.config.optimizer, self.schedules[step])
        recorded = self.record.rates.get(step, rate)
        if rate != recorded:
            raise ConfigError(
                f"step {step} of {self.record.folder} was made with the learning rate {recorded}, "
                f"and its configuration says {rate}: it had a schedule of its user, which only "
                "their code knows"
            )
        return rate

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of this rank's shards of the weights, name → tensor on the host."""
        held = tensors_to_save(self._engine, self._optimizer)["model"]
        return {name: local_shard(each)[0].to("cpu", copy=True) for name, each in held.items()}


def _compared(
    engine: Engine,
    optimizer: AnyOptimizer,
    saved: Checkpoint,
    before: Mapping[str, torch.Tensor],
    world: World,
) -> WeightsCompared:
    """Compare weights and optimizer state with those in `saved`, each rank its own shards. `before`
    maps names to this rank's shards of the weights before the steps. Collective."""
    different: set[str] = set()
    squares = torch.zeros(2, 2, dtype=torch.float64)  # (model, optimizer) × (distance, measure)
    names = set()
    for name, group, own, there in _beside(engine, optimizer, saved):
        names.add(name)
        if not torch.equal(own.view(torch.uint8), there.view(torch.uint8)):
            different.add(name)
        is_weight = group == "model"
        begun = _flat(before[name.removeprefix("model ")]) if is_weight else torch.zeros_like(own)
        row = squares[0 if is_weight else 1]
        row[0] += (own.double() - there.double()).square().sum()
        row[1] += (there.double() - begun.double()).square().sum()
    every = world.all_gather((names, different, squares))
    total = sum((of_rank[2] for of_rank in every), torch.zeros_like(squares)).sqrt()
    distances = [0.0 if d == 0 else d / m if m else math.inf for d, m in total.tolist()]
    return WeightsCompared(
        saved.step,
        len(set().union(*(of_rank[0] for of_rank in every))),
        tuple(sorted(set().union(*(of_rank[1] for of_rank in every)))),
        *distances,
    )


def _beside(
    engine: Engine, optimizer: AnyOptimizer, saved: Checkpoint
) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
    """Yield, for each tensor that this rank holds, what is to be compared: (its name with its
    group, the group, this rank's shard, the same region of the tensor in the checkpoint `saved`).
    Both tensors are flat, contiguous and on the host. Raises CorruptError if a tensor is not in the
    checkpoint."""
    for group, tensors in tensors_to_save(engine, optimizer).items():
        stored = saved.tensors(group) if tensors else {}
        for name, tensor in tensors.items():
            own, offset = local_shard(tensor)
            if name not in stored:
                raise CorruptError(f"{saved.path} has no {group} tensor {name}")
            region = tuple(
                slice(start, start + size) for start, size in zip(offset, own.shape, strict=True)
            )
            there = stored[name][region]
            yield f"{group} {name}", group, _flat(own), _flat(there)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().reshape(-1).contiguous()
