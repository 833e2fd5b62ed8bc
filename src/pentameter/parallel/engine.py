"""The Engine: one rank's forward, backward and evaluation passes, which a trainer calls alike under
every layout.

Shapes: B this rank's batch rows, T tokens, D channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from pentameter.data.batches.step import Batch, evaluation_rows, refuse_unknown_ids
from pentameter.errors import ConfigError
from pentameter.fused_cpu.captured.passes import CapturedPasses
from pentameter.fused_cpu.vector.linear import folding_once, unfolding_later
from pentameter.machine.on_host import on_host
from pentameter.model.loss import AuxiliaryLoss
from pentameter.parallel import gradients
from pentameter.parallel.data_parallel import micro_batch, reshard
from pentameter.parallel.experts.balance import ExpertLoads, RouterBalance
from pentameter.parallel.memory.rounded_weights import RoundedWeights
from pentameter.parallel.mesh import Mesh
from pentameter.parallel.names import Names
from pentameter.parallel.pipeline.pipeline import Pipeline
from pentameter.parallel.precision import Arithmetic
from pentameter.parallel.sources.model_source import ModelSource
from pentameter.parallel.sources.tied_parameters import TiedReplicas
from pentameter.parallel.stage_module import StageModule, adding_in_one_order
from pentameter.planning.architecture import IGNORED_TARGET
from pentameter.planning.layouts.layout import BATCH_DIMENSIONS
from pentameter.planning.plan import Plan
from pentameter.tree import Tree, leaves, map_leaves


@dataclass(frozen=True)
class LossSum:
    """A loss summed over target tokens, in nats, and their number. Either may be a 0-dim float64
    tensor on a GPU, so that the host need not wait for it."""

    total: Tensor | float
    n_targets: Tensor | int

    @property
    def mean(self) -> float:
        """Mean loss in nats per target token; NaN for no targets. Waits for a GPU's tensors."""
        return float(self.total) / int(self.n_targets) if self.n_targets else float("nan")

    def __add__(self, other: LossSum) -> LossSum:
        return LossSum(self.total + other.total, self.n_targets + other.n_targets)


@contextmanager
def keeping_buffers(models: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager: forward passes inside it leave no trace in the models' buffers, such as
    batch norm's statistics, which are set back to their former values at its end."""
    buffers = [buffer for model in models for buffer in model.buffers()]
    kept = [buffer.clone() for buffer in buffers]
    yield
    for buffer, before in zip(buffers, kept, strict=True):
        buffer.copy_(before)


class Engine:
    """Runs batches through this rank's slices of the model (its pipeline stages).

    `stage_modules` are the slices that `source` (a GPT or custom model) built, in stage order.
    `wrapped` maps each stage number to the module that trains it: the stage module, or DDP around
    it. `tied` lists parameters that stages on other ranks also hold. `plan` has the run's sharding,
    batch sizes and steps; `mesh` has this rank's coordinates and groups. Methods are collective:
    every rank in the world calls them with the same arguments, except for the batch rows.
    """

    def __init__(
        self,
        stage_modules: Sequence[StageModule],
        wrapped: Mapping[int, nn.Module],
        tied: TiedReplicas,
        plan: Plan,
        device: torch.device,
        mesh: Mesh,
        source: ModelSource,
    ) -> None:
        self.source = source
        self.stage_modules = stage_modules
        self.plan = plan
        self.device = device
        self.mesh, self.world = mesh, mesh.world
        self.meshes = mesh.all_parameters
        """The DeviceMeshes on which parameters are placed: the layout's, and another one for
        sharded experts; none in a single process that shards nothing."""
        self._wrapped = wrapped
        # Cached: walking the modules takes a GPU's host as long as launching a small step.
        every = (pair for model in self.models for pair in model.named_parameters())
        self._named = list({id(parameter): (name, parameter) for name, parameter in every}.values())
        self._modes = _Modes(self.models)
        modules = (module for model in self.models for module in model.modules())
        self._auxiliary_losses = [each for each in modules if isinstance(each, AuxiliaryLoss)]
        self._rounded = _rounded_weights(stage_modules, plan)
        self._shard = BatchShard(
            plan, mesh, device, self.arithmetic.weights, stays_on_device=self.host_waits
        )
        self._tied = tied
        mesh.world.activity.naming = Names(dict(zip(wrapped, stage_modules, strict=True)), mesh)
        self._stages: Pipeline | SingleStage
        if plan.layout.pipeline == 1 or not self.meshes:
            self._stages = SingleStage(stage_modules[0], wrapped, plan, alone=not self.meshes)
        else:
            group, collect = self.meshes[0]["pipeline"].get_group(), self._rounded.collect
            self._stages = Pipeline(wrapped, stage_modules[0], plan, group, collect)
        self.router_balance = RouterBalance(self.models, plan, mesh.parameters)
        self.expert_loads = ExpertLoads(self.models, plan, mesh, device)
        self._summed = gradients.replicas_to_sum(
            self._named, plan, mesh.along, by_dtensor=source.computes_with_dtensors
        )

    # -- model, mesh, parameters ----------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The full model, its parameters sharded or not. Raises ConfigError under pipeline
        parallelism; then `models` has this rank's slices."""
        if isinstance(self._stages, Pipeline):
            raise ConfigError(
                f"with parallel.pipeline={self.plan.layout.pipeline} no process has the whole "
                "model; engine.models are the slices of this one"
            )
        (stage_module,) = self.stage_modules
        return stage_module.model

    @property
    def models(self) -> list[nn.Module]:
        """This rank's slices of the model, in stage order; one, the full model, without a
        pipeline."""
        return [each.model for each in self.stage_modules]

    @property
    def arithmetic(self) -> Arithmetic:
        """The dtypes, autocast context and matmul that `train.precision` implies."""
        return self.stage_modules[0].arithmetic

    @property
    def host_waits(self) -> bool:
        """True on CUDA. Reading a number from the device makes the host wait there, so a step's
        loss and counts are returned as tensors on the device."""
        return self.device.type == "cuda"

    @property
    def is_whole(self) -> bool:
        """True if each rank has the full model and can run it alone: no tensor, pipeline or context
        parallelism, and no ZeRO."""
        layout = self.plan.layout
        return layout.is_data_parallel and layout.context == 1 and not layout.zero

    @property
    def rows(self) -> np.ndarray:
        """Row numbers in the global batch that this rank computes, int64 (B,)."""
        return self._shard.rows

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (name, parameter) for this rank's slices, replicas of tied parameters included;
        names are those of the full model."""
        yield from self._named

    def owned_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (name, parameter) as `named_parameters` does, but leave out replicas of tied
        parameters that another stage owns."""
        yield from (pair for pair in self._named if pair[0] not in self._tied.replicas)

    @property
    def adds_up_in_place(self) -> bool:
        """True if gradients are zeroed in place instead of set to None, because their memory must
        stay: views into DDP's buckets that accumulate over micro-batches, or gradients that a
        replayed CUDA graph adds to."""
        if not self.meshes:
            return any(module.replays for module in self.stage_modules)
        has_buckets = all(
            isinstance(each, DistributedDataParallel) for each in self._wrapped.values()
        )
        return has_buckets and self.plan.n_micro_batches > 1

    def parameters(self) -> Sequence[Parameter]:
        """Return this rank's parameters, in the order of `named_parameters`."""
        return [parameter for _, parameter in self._named]

    # -- the step -------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, step: int, *, loss_scale: float = 1.0) -> LossSum:
        """Run forward and backward for one training step. Returns the loss summed over all ranks;
        the gradients of its mean, times `loss_scale`, are in the parameters' `.grad`. Collective.

        `batch` holds this rank's `rows`, and `step` numbers the step, from which dropout keys
        follow. A rank whose `loss_scale` is 0 adds nothing to the gradients. Each micro-batch
        contributes its summed loss divided by the whole step's target count, which is known before
        the first backward pass. So accumulation is exact however targets fall on micro-batches and
        ranks. The gradients also include those of auxiliary losses (a router's), which are not part
        of the returned loss.
        """
        self._train(True)
        n_targets = self._shard.count_targets(batch)
        factor = _loss_factor(loss_scale, n_targets, self.arithmetic.weights)
        inputs, targets = self._shard.tensors(batch)
        keys = self._shard.keys(self.source, step, batch.rows)
        for each in self._auxiliary_losses:
            # Per token, not per target: a router routes every token, masked targets or not.
            each.start_step(loss_scale / self.plan.tokens_per_step)
        self.expert_loads.start_step()
        with self._rounded, adding_in_one_order(self.stage_modules):
            total = self._stages.train(inputs, targets, keys, factor)
        self._reduce_gradients()
        return LossSum(self._shard.sum_losses(total), n_targets)

    def _reduce_gradients(self) -> None:
        """All-reduce, in place, the gradients that are not reduced in the backward pass.

        These are the gradients of parameters that are replicated along the mesh dimensions in their
        `Placement.summed_over`: over tensor ranks that computed them from different tokens or
        heads, and over data ranks under tensor, expert or pipeline parallelism without ZeRO. In all
        other layouts DDP or FSDP reduces over data ranks in the backward pass. Then come tied
        parameters that several stages hold.

        First, a parameter that took no part in the loss gets a zero gradient, so that every rank
        reduces the same list. Collective.
        """
        for parameter in self.parameters() if self.source.may_leave_unused else ():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not self.meshes:
            return
        gradients.placed_as_parameters(self.parameters())
        for group, replicas in self._summed:
            gradients.add_up_all(replicas, group)
        self._tied.add_up()

    def gradient_norm(self) -> Tensor:
        """Compute the Euclidean norm over all gradients in the full model, 0-dim, the same number
        on every rank. Collective."""
        if not self.meshes:
            return gradients.norm_here(self.parameters())
        owned = [parameter for _, parameter in self.owned_parameters()]
        return gradients.global_norm(owned, *self.meshes)

    def unscale_gradients(self, scale: float) -> None:
        """Divide every gradient by `scale`, the loss scale, in place."""
        gradients.unscale(self.parameters(), scale)

    def clip_gradients(self, norm: Tensor, limit: float) -> None:
        """Scale all gradients by one factor so that their norm, now `norm` (0-dim), is at most
        `limit`; a limit of 0 does not clip."""
        gradients.clip(self.parameters(), norm, limit)

    def zero_gradients(self) -> None:
        """Set every `.grad` to None, or fill it with zeros if `adds_up_in_place`."""
        gradients.zero(self.parameters(), in_place=self.adds_up_in_place)

    # -- without gradients ----------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> LossSum:
        """Compute the loss summed over `batch`, the same batch on every rank, without dropout. Its
        rows are split over the data-parallel ranks, and padded with masked rows if they do not
        split evenly. Collective.

        Raises ConfigError if rows must be padded and the targets are not integers, which cannot be
        masked.
        """
        self._train(False)
        own = evaluation_rows(batch, self.plan.layout, self.world.rank)
        total = self._stages.evaluate(*self._shard.tensors(own))
        reshard(self._wrapped.values(), self.plan.layout)
        return LossSum(self._shard.sum_losses(total), batch.n_targets)

    @torch.no_grad()
    def row_losses(self, batch: Batch) -> np.ndarray:
        """Compute each row's summed loss in nats, float64 (B,), on every rank, for the same batch
        of B token rows on every rank, without dropout. Collective.

        The rows are split over the data-parallel ranks as in `evaluate`. If the model source
        accepts shorter rows, all are truncated after the last position at which any row has an
        unmasked target.
        """
        self._train(False)
        batch = _cut(batch, partial(self.source.row_length, self.plan))
        own = evaluation_rows(batch, self.plan.layout, self.world.rank)
        losses = self._stages.row_losses(*self._shard.tensors(own))
        reshard(self._wrapped.values(), self.plan.layout)
        return self._shard.gather_rows(losses)[: len(batch.rows)]

    @torch.no_grad()
    def next_logits(self, text: np.ndarray) -> np.ndarray:
        """Return next-token logits (B, V), float64, after the token ids `text` (B, n), n ≤
        context_length, on every rank. Collective.

        For sampling when no rank holds the full model: each token takes a forward pass over the
        full context.
        """
        self._train(False)
        T = self.plan.config.model.context_length
        n_seen = text.shape[1]
        filled = np.zeros((len(text), T), dtype=np.int64)  # causal: padding is not seen
        filled[:, :n_seen] = text
        logits = self._stages.logits(self._shard.local_positions(filled))
        reshard(self._wrapped.values(), self.plan.layout)
        vocab_size = self.plan.config.model.vocab_size
        layout = self.plan.layout
        context_rank, index = layout.holder(n_seen - 1, T)
        local_logits = None
        if logits is not None and context_rank == self._shard.mesh.coordinates["context"]:
            local_logits = on_host(logits[:, index, :vocab_size])
        pipeline_rank = layout.pipeline_rank_of_stage[layout.n_stages - 1]
        last = layout.rank_of(pipeline=pipeline_rank, context=context_rank)
        result = self.world.broadcast(local_logits, source=last)
        assert result is not None  # the last stage's rank sends logits
        return result

    def _train(self, training: bool) -> None:
        self._modes.switch((*self._wrapped.values(), *self.models), training)


class _Modes:
    """Switches modules between training and evaluation mode. Modules inside `models` that were in
    evaluation mode at the start while the model itself was in training mode, such as a user's
    frozen layers with dropout, always stay in evaluation."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        trained = [model for model in models if model.training]
        self._kept = [each for m in trained for each in m.modules() if not each.training]

    def switch(self, modules: Iterable[nn.Module], training: bool) -> None:
        """Switch `modules` to training or evaluation, in place."""
        for module in modules:
            if module.training != training:
                module.train(training)
                for each in self._kept:
                    each.training = False


class SingleStage:
    """Trains and evaluates a model without pipeline parallelism. It has the methods of `Pipeline`,
    so that the Engine calls either alike. `wrapped` has one entry, the module that training calls:
    `stage_module`, or DDP around it. Evaluation calls `stage_module`. `alone` says that neither DDP
    nor FSDP holds memory in which micro-batches' gradients add up."""

    def __init__(
        self,
        stage_module: StageModule,
        wrapped: Mapping[int, nn.Module],
        plan: Plan,
        *,
        alone: bool,
    ) -> None:
        (self._trained,) = wrapped.values()
        self._stage_module = stage_module
        self._plan = plan
        self._alone = alone
        self._captured = None
        if alone and stage_module.is_fused:
            self._captured = CapturedPasses(self._passes, stage_module)

    def train(
        self, inputs: Tree, targets: Tree, keys: Tensor | None, factor: Tensor | float
    ) -> Tensor:
        """Run forward and backward for one micro-batch after another. Inputs and targets are
        (B, …), this rank's rows; dropout `keys` are (B, …), or None for no dropout. Returns the
        summed loss in nats, ().

        The gradients of that loss times `factor`, a number or 0-dim tensor, are added to the
        parameters' `.grad`, and so are those of the model's auxiliary losses, which have a factor
        of their own. After the last micro-batch they are summed over data-parallel ranks if DDP or
        FSDP does so. Under tensor or expert parallelism without ZeRO neither does:
        `Engine._reduce_gradients` follows.
        """
        if self._captured is None:
            return self._passes(inputs, targets, keys, factor)
        # A number would be replayed with the operations.
        factor = torch.as_tensor(factor, dtype=self._stage_module.arithmetic.weights)
        return self._captured(inputs, targets, keys, factor)

    def _passes(
        self, inputs: Tree, targets: Tree, keys: Tensor | None, factor: Tensor | float
    ) -> Tensor:
        """Run the passes of `train`."""
        losses = []
        n_rows = len(leaves(inputs)[0])
        with folding_once():
            for rows in micro_batches(n_rows, self._plan.micro_batch_size):
                is_last = rows.stop >= n_rows
                with (
                    micro_batch(self._trained, self._plan.rules, is_last=is_last),
                    unfolding_later(more_follow=self._alone and not is_last),
                ):
                    x, y = (map_leaves(itemgetter(rows), each) for each in (inputs, targets))
                    own_keys = None if keys is None else keys[rows]
                    # (1,): `StageModule.forward` gives the model's 0-dim loss a dimension.
                    loss = self._trained(x, y, own_keys)
                    (loss.sum() * factor).backward()
                losses.append(loss.detach())
        return torch.cat(losses).sum()

    def evaluate(self, inputs: Tree, targets: Tree) -> Tensor:
        """Compute the summed loss in nats, (), for inputs and targets (B, …), without gradients."""
        return self._stage_module(inputs, targets).sum()

    def row_losses(self, inputs: Tree, targets: Tree) -> Tensor:
        """Compute each batch row's summed loss in nats, (B,), for inputs and targets (B, …),
        without gradients."""
        losses: Tensor = self._stage_module(inputs, targets, by_row=True)
        return losses

    def logits(self, tokens: Tensor) -> Tensor:
        """Compute logits (B, T, V) for token ids (B, T)."""
        return self._stage_module(tokens)


@dataclass(frozen=True)
class BatchShard:
    """Selects this rank's positions from its batch rows, as tensors on its device, and sums targets
    and losses over all ranks.

    `dtype` is the one that floating-point inputs and targets are cast to. Sums are Python numbers,
    or 0-dim float64 tensors on the device if `stays_on_device`.
    """

    plan: Plan
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    stays_on_device: bool

    @property
    def rows(self) -> np.ndarray:
        """Row numbers in the global batch that this rank computes, int64 (B,)."""
        rows = self.plan.layout.rows(self.mesh.world.rank, self.plan.batch_size)
        return np.arange(rows.start, rows.stop, dtype=np.int64)

    @property
    def _attention_rows(self) -> np.ndarray:
        """Row numbers in the global batch whose attention this rank computes, int64 (B,). In tensor
        mode 3d they differ from `rows`; in any other they are the same."""
        rows = self.plan.layout.attention_rows(self.mesh.world.rank, self.plan.batch_size)
        return np.arange(rows.start, rows.stop, dtype=np.int64)

    def tensors(self, batch: Batch) -> tuple[Tree, Tree]:
        """Return the batch's inputs and targets, (B, …) each, at this rank's positions, on the
        device. Raises ConfigError for a token id that a GPT does not have: the kernels of its
        embedding and its loss read where an id says."""
        vocab_size = self.plan.config.model.vocab_size
        if self.plan.built_by is None and vocab_size is not None:
            refuse_unknown_ids(batch.inputs, 0, vocab_size, "batch.inputs")
            refuse_unknown_ids(batch.targets, IGNORED_TARGET, vocab_size, "batch.targets")
        inputs, targets = (
            map_leaves(self.local_positions, each) for each in (batch.inputs, batch.targets)
        )
        return inputs, targets

    def local_positions(self, array: np.ndarray) -> Tensor:
        """Copy this rank's positions from an array (B, T) to the device, or without context
        parallelism the whole array (B, …). Floats are cast to `dtype`."""
        layout = self.plan.layout
        if layout.context > 1:
            T = self.plan.config.model.context_length
            chunks = layout.positions(self.mesh.coordinates["context"], T)
            array = np.concatenate([array[:, each.start : each.stop] for each in chunks], 1)
        tensor = torch.from_numpy(array)
        return self._copy(tensor.to(self.dtype) if tensor.is_floating_point() else tensor)

    def keys(self, source: ModelSource, step: int, rows: np.ndarray) -> Tensor | None:
        """Return the random keys that `source` derives for the batch rows numbered `rows` (B,) at a
        step: dropout keys (B, …) on the device, or generator seeds (B,) on the host; None if
        nothing is random."""
        # In tensor mode 3d alone attention is computed for other rows than these.
        attended = self._attention_rows[: len(rows)] if self.plan.layout.is_3d else rows
        keys = source.row_keys(self.plan, step, rows, attended)
        return keys if keys is None or source.draws_from_generator else self._copy(keys)

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy `tensor` to the device, same shape; through pinned memory to a GPU, so that the host
        need not wait."""
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def count_targets(self, batch: Batch) -> Tensor | int:
        """Count the targets in the whole global batch, on every rank, given this rank's rows. With
        several ranks it is a 0-dim float64 tensor on the device if `stays_on_device`, else an
        integer. Collective."""
        if self.mesh.world.size == 1:
            return batch.n_targets
        others = self.mesh.coordinates.keys() - BATCH_DIMENSIONS
        counts = not any(self.mesh.coordinates[name] for name in others)
        own = batch.n_targets if counts else 0
        total = self._sum(torch.full((), own, dtype=torch.float64, device=self.device))
        return total if isinstance(total, Tensor) else round(total)

    def sum_losses(self, own: Tensor) -> Tensor | float:
        """All-reduce this rank's summed loss, 0-dim or (1,), over all ranks. Ranks that shard the
        vocabulary all hold the same loss; only the first one's is counted. Collective."""
        return self._sum(own if self._counts_loss else torch.zeros_like(own))

    @property
    def _counts_loss(self) -> bool:
        """True if this rank's loss is added to the sum over all ranks. Ranks that shard the
        vocabulary all compute the same loss, so only the one at coordinate 0 counts."""
        return not any(self.mesh.coordinates[name] for name in self.plan.sharding.loss_replicas)

    def gather_rows(self, own: Tensor) -> np.ndarray:
        """Return every row's loss in a full batch, float64 (n_batch_shards · B,), in row order,
        given the losses of this rank's rows, `own` (B,). Each context-parallel rank has the loss of
        its own positions only; these are added. Collective."""
        if self.mesh.world.size == 1:
            return on_host(own)
        layout = self.plan.layout
        n_rows = len(own) * layout.n_batch_shards
        rows = layout.attention_rows(self.mesh.world.rank, n_rows)  # those whose logits are here
        losses = torch.zeros(n_rows, dtype=torch.float64, device=self.device)
        if self._counts_loss:
            losses[rows.start : rows.stop] = own
        dist.all_reduce(losses)
        return losses.cpu().numpy()

    def _sum(self, own: Tensor) -> Tensor | float:
        """All-reduce a number, 0-dim or (1,), over the world, perhaps overwriting it. Returns a
        float, or a 0-dim float64 tensor if sums stay on the device. Collective."""
        if self.mesh.world.size > 1:
            own = own.to(torch.float64)
            dist.all_reduce(own)
        return own.reshape(()).to(torch.float64) if self.stays_on_device else own.item()


def _rounded_weights(modules: Sequence[StageModule], plan: Plan) -> RoundedWeights:
    """Return the context manager for a step's passes, in which weights are rounded to the matmul
    dtype once per step, for the units in this rank's stages. It does nothing unless
    `plan.rounds_once`, which says for which layouts this pays, and unless autocast rounds at
    all."""
    dtype = modules[0].arithmetic.autocast_dtype
    if not plan.rounds_once or dtype is None:
        return RoundedWeights()
    return RoundedWeights([unit for module in modules for unit in module.units], dtype)


def _cut(batch: Batch, row_length: Callable[[int], int]) -> Batch:
    """Truncate a batch of token rows (B, T) after the last target that counts in the loss, as
    nothing after it is needed. `row_length` maps the number of tokens that are needed to the number
    that the model computes."""
    counted = np.flatnonzero((batch.targets != IGNORED_TARGET).any(0))
    T = row_length(int(counted.max(initial=0)) + 1)
    return replace(batch, inputs=batch.inputs[:, :T], targets=batch.targets[:, :T])


def micro_batches(n_rows: int, micro_batch_size: int) -> Iterator[slice]:
    """Yield one slice per micro-batch, in order, into a tensor with `n_rows` batch rows on this
    rank. The last micro-batch has fewer rows if `micro_batch_size` does not divide `n_rows`; its
    slice may then end beyond them."""
    for start in range(0, n_rows, micro_batch_size):
        yield slice(start, start + micro_batch_size)


def _loss_factor(loss_scale: float, n_targets: Tensor | int, dtype: torch.dtype) -> Tensor | float:
    """Return loss_scale / n_targets, by which a summed loss is multiplied before its backward pass;
    0 targets count as 1. For a number `n_targets` it is a float. For a tensor it is a 0-dim tensor
    in `dtype`, as a float64 one would make all that follows float64."""
    if not isinstance(n_targets, Tensor):
        return loss_scale / max(1, n_targets)
    return (loss_scale / n_targets.clamp(min=1)).to(dtype)
