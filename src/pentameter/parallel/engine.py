"""The Engine: one rank's work in a step, which a trainer drives under any layout.

Shapes: B this rank's batch rows, T tokens, D channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from pentameter.data.batches.step import Batch
from pentameter.data.batches.tree import Tree, leaves, map_leaves
from pentameter.errors import ConfigError
from pentameter.model.loss import AuxiliaryLoss
from pentameter.parallel import gradients
from pentameter.parallel.data_parallel import micro_batch
from pentameter.parallel.gradients import lies_on
from pentameter.parallel.memory.rounded_weights import rounded_weights
from pentameter.parallel.pipeline.pipeline import Pipeline
from pentameter.parallel.precision import Arithmetic
from pentameter.parallel.sources.model_source import ModelSource
from pentameter.parallel.sources.tied_parameters import TiedCopies
from pentameter.parallel.stage_module import StageModule
from pentameter.planning.architecture import IGNORED_TARGET
from pentameter.planning.layout import BATCH_DIMENSIONS, PARAMETER_DIMENSIONS
from pentameter.planning.plan import Plan
from pentameter.processes.world import World


@dataclass(frozen=True)
class LossSum:
    """A summed loss in nats and the number of target tokens it is summed over; every report uses
    `mean`. Both are tensors, 0-dim float64 on the device, if the host would wait to read them."""

    total: Tensor | float
    n_targets: Tensor | int

    @property
    def mean(self) -> float:
        """Nats per target token; NaN for no targets."""
        return float(self.total) / int(self.n_targets) if self.n_targets else float("nan")

    def __add__(self, other: LossSum) -> LossSum:
        return LossSum(self.total + other.total, self.n_targets + other.n_targets)


class Engine:
    """One rank's slices of the model, and how to run a batch through them.

    `stage_modules` are the slices from `source`, in order. `wrapped` maps each stage number to the
    module that runs it: the stage module, or DDP around it. Methods are collective: every rank in
    the world calls them with the same arguments, except for the batch rows.
    """

    def __init__(
        self,
        stage_modules: Sequence[StageModule],
        wrapped: Mapping[int, nn.Module],
        plan: Plan,
        device: torch.device,
        world: World,
        mesh: DeviceMesh | None,
        source: ModelSource,
    ) -> None:
        self.source = source
        self.stage_modules = stage_modules
        self.plan = plan
        self.device = device
        self.world = world
        self._mesh = mesh
        self._wrapped = wrapped
        # Cached: walking the modules takes a GPU's host as long as launching a small step.
        every = (pair for model in self.models for pair in model.named_parameters())
        self._named = list({id(parameter): (name, parameter) for name, parameter in every}.values())
        modules = (module for model in self.models for module in model.modules())
        self._auxiliary_losses = [each for each in modules if isinstance(each, AuxiliaryLoss)]
        self._rounded = rounded_weights(source, self.models, plan, self.arithmetic)
        self._pipeline: Pipeline | None = None
        self._tied: TiedCopies | None = None
        if mesh is not None and plan.layout.pipeline > 1:
            collect = self._rounded.collect
            self._pipeline = Pipeline(wrapped, stage_modules[0], plan, mesh, collect)
            self._tied = TiedCopies(plan, mesh, world, dict(self._named))
        self._summed = self._summed_copies()
        coordinates = plan.layout.coordinates(world.rank)
        self._coordinates = coordinates
        self._chunks = plan.layout.positions(
            coordinates["context"], plan.config.model.context_length
        )

    # -- model, mesh, parameters ----------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model if the layout has no pipeline, its parameters sharded or not. Raises
        ConfigError under a pipeline; its slices are in `models`."""
        if self._pipeline is not None:
            raise ConfigError(
                f"with parallel.pipeline={self.plan.layout.pipeline} no process has the whole "
                "model; engine.models are the slices of this one"
            )
        (stage_module,) = self.stage_modules
        return stage_module.model

    @property
    def models(self) -> list[nn.Module]:
        """The slices of the model that this rank holds."""
        return [each.model for each in self.stage_modules]

    @property
    def mesh(self) -> DeviceMesh | None:
        """The layout's device mesh; None for a single process that shards nothing."""
        return self._mesh

    @property
    def arithmetic(self) -> Arithmetic:
        """The run's dtypes, its autocast context and its matmul."""
        return self.stage_modules[0].arithmetic

    @property
    def host_waits(self) -> bool:
        """True if a host that reads a number waits for its device: the numbers of a step then stay
        there."""
        return self.device.type == "cuda"

    @property
    def is_whole(self) -> bool:
        """True if each rank has the full model, and can use it without the others."""
        layout = self.plan.layout
        return layout.is_data_parallel and layout.context == 1 and not layout.zero

    @property
    def rows(self) -> np.ndarray:
        """Row numbers in the global batch that this rank computes, int64 (B,)."""
        rows = self.plan.layout.rows(self.world.rank, self.plan.batch_size)
        return np.arange(rows.start, rows.stop, dtype=np.int64)

    @property
    def _attention_rows(self) -> np.ndarray:
        """Row numbers in the global batch whose attention heads this rank computes, int64 (B,)."""
        rows = self.plan.layout.attention_rows(self.world.rank, self.plan.batch_size)
        return np.arange(rows.start, rows.stop, dtype=np.int64)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield parameters by their names in the parameter table, copies of tied ones included."""
        yield from self._named

    def owned_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield `named_parameters` without copies of parameters that another stage owns."""
        for name, parameter in self.named_parameters():
            if self._tied is None or name not in self._tied.copies:
                yield name, parameter

    @property
    def adds_up_in_place(self) -> bool:
        """True if gradients are zeroed in place instead of set to None. Gradients that are views
        into DDP's buckets would otherwise be held twice, and a replayed graph would overwrite its
        own."""
        if self._mesh is None:
            return any(module.replays for module in self.stage_modules)
        has_buckets = all(
            isinstance(each, DistributedDataParallel) for each in self._wrapped.values()
        )
        return has_buckets and self.plan.n_micro_batches > 1

    def parameters(self) -> Iterable[Parameter]:
        """Return parameters in the order of `named_parameters`."""
        return [parameter for _, parameter in self._named]

    # -- the step -------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, step: int, *, loss_scale: float = 1.0) -> LossSum:
        """Run forward and backward for one step. Returns the loss over all ranks; its gradients,
        times `loss_scale`, are in the parameters' `.grad`.

        `batch` holds this rank's `rows`. Each micro-batch contributes its summed loss divided by
        the whole step's target count, which is known before the first backward pass. So
        accumulation is exact however targets fall on micro-batches and ranks.
        """
        self._train(True)
        n_targets = self._over_rows(batch.n_targets)
        factor = self._loss_factor(loss_scale, n_targets)
        inputs, targets = self._to_device(batch)
        keys = self._keys(step, batch.rows)
        for each in self._auxiliary_losses:
            each.start_step(factor)
        with self._rounded:
            if self._pipeline is not None:
                n_micro_batches = len(batch.rows) // self.plan.micro_batch_size
                total = self._pipeline.train(inputs, targets, keys, factor, n_micro_batches)
            else:
                total = self._accumulate(inputs, targets, keys, factor)
        self._reduce_gradients()
        return LossSum(self._sum_loss_over_world(total), n_targets)

    def _accumulate(
        self, inputs: Tree, targets: Tree, keys: Tensor | None, factor: Tensor | float
    ) -> Tensor:
        """Run forward and backward for one micro-batch after another. Inputs and targets are
        (B, …), keys (B, …). Returns the summed loss in nats, ()."""
        (module,) = self._wrapped.values()
        losses = []
        n_rows = len(leaves(inputs)[0])
        for rows in micro_batches(n_rows, self.plan.micro_batch_size):
            is_last = rows.stop >= n_rows
            with micro_batch(module, self.plan.rules, is_last=is_last):
                x, y = (map_leaves(itemgetter(rows), each) for each in (inputs, targets))
                own_keys = None if keys is None else keys[rows]
                loss = module(x, y, own_keys)
                (loss.sum() * factor).backward()
            losses.append(loss.detach())
        return torch.cat(losses).sum()

    def _reduce_gradients(self) -> None:
        """Run the gradient all-reduces that backward has not: over sequence, data and tied copies.
        A parameter that took no part in the loss gets a zero gradient, on every rank."""
        for parameter in self.parameters() if self.source.may_leave_unused else ():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._mesh is None:
            return
        gradients.placed_as_parameters(self.parameters())
        for dimension, copies in self._summed.items():
            gradients.add_up(_local_gradients(copies), self._mesh[dimension].get_group())
        if self._tied is not None:
            self._tied.add_up()

    def _summed_copies(self) -> dict[str, list[Parameter]]:
        """Map each mesh dimension over which placements sum gradients to its parameters. DTensor's
        own backward pass sums those of a module that computes with DTensors on that dimension."""
        by_dtensor = self.source.computes_with_dtensors
        found = {
            dimension: [
                parameter
                for name, parameter in self._named
                if dimension in self.plan.placements[name].summed_over
                and not (by_dtensor and lies_on(parameter, dimension))
            ]
            for dimension in reversed(PARAMETER_DIMENSIONS)  # neighbouring ranks first
        }
        return {dimension: copies for dimension, copies in found.items() if copies}

    def gradient_norm(self) -> Tensor:
        """Compute the gradient's Euclidean norm, 0-dim, the same number on every rank."""
        if self._mesh is None:
            return gradients.norm_here(self.parameters())
        owned = [parameter for _, parameter in self.owned_parameters()]
        return gradients.global_norm(owned, self._mesh)

    def unscale_gradients(self, scale: float) -> None:
        """Divide every gradient by the loss scale, in place."""
        gradients.unscale(self.parameters(), scale)

    def clip_gradients(self, norm: Tensor, limit: float) -> None:
        """Scale all gradients by one factor so that their norm, now `norm` (0-dim), is at most
        `limit`; a limit of 0 does not clip."""
        gradients.clip(self.parameters(), norm, limit)

    def zero_gradients(self) -> None:
        """Set every `.grad` to None, or zero it if gradients accumulate in place."""
        held = [p.grad for p in self.parameters() if p.grad is not None]
        if self.adds_up_in_place and held:
            torch._foreach_zero_(held)
            return
        for parameter in self.parameters():
            parameter.grad = None

    # -- without gradients ----------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> LossSum:
        """Compute the loss over a full batch, split over the data-parallel ranks, without dropout.

        Raises ConfigError if the rows do not split evenly and the targets are not integers: the
        missing rows cannot be masked then.
        """
        self._train(False)
        own = self._own_rows(batch)
        inputs, targets = self._to_device(own)
        if self._pipeline is not None:
            total = self._pipeline.evaluate(inputs, targets, self._n_evaluated)
        else:
            (stage_module,) = self.stage_modules
            total = stage_module(inputs, targets).sum()
        self._reshard_weights()
        return LossSum(self._sum_loss_over_world(total), batch.n_targets)

    def _own_rows(self, batch: Batch) -> Batch:
        """Return this rank's rows of an evaluation batch: as many as every other's, padded with
        copies of the first row whose targets are masked."""
        n_split = self.plan.layout.n_batch_shards
        n_rows = -(-len(batch.rows) // (n_split * self._n_evaluated)) * self._n_evaluated
        first = self.plan.layout.data_index(self.world.rank) * n_rows
        rows = np.arange(first, first + n_rows, dtype=np.int64)
        is_missing = rows >= len(batch.rows)
        taken = np.where(is_missing, 0, rows)
        n_padded = n_split * n_rows
        if n_padded > len(batch.rows) and any(
            array.dtype.kind not in "iu" for array in leaves(batch.targets)
        ):
            raise ConfigError(
                f"an evaluation of {len(batch.rows)} rows over {n_split * self._n_evaluated} parts "
                f"takes rows that do not count, and only integer targets can be {IGNORED_TARGET}; "
                f"evaluate a multiple, {n_padded} rows"
            )

        def targets_of(array: np.ndarray) -> np.ndarray:
            own: np.ndarray = array[taken]
            own[is_missing] = IGNORED_TARGET
            return own

        inputs = map_leaves(itemgetter(taken), batch.inputs)
        return Batch(inputs, map_leaves(targets_of, batch.targets), rows)

    @torch.no_grad()
    def next_logits(self, text: np.ndarray) -> np.ndarray:
        """Return next-token logits (B, V) after text (B, n), n ≤ context_length, float64, on every
        rank.

        Samples from a model that no rank holds in full: each token takes a forward pass over the
        full context.
        """
        self._train(False)
        T = self.plan.config.model.context_length
        n_seen = text.shape[1]
        filled = np.zeros((len(text), T), dtype=np.int64)  # causal: padding is not seen
        filled[:, :n_seen] = text
        tokens = self._local_positions(filled)
        if self._pipeline is not None:
            logits = self._pipeline.logits(tokens)
        else:
            (stage_module,) = self.stage_modules
            logits = stage_module(tokens)
        self._reshard_weights()
        vocab_size = self.plan.config.model.vocab_size
        layout = self.plan.layout
        context_rank, index = layout.holder(n_seen - 1, T)
        local_logits = None
        if logits is not None and context_rank == layout.coordinates(self.world.rank)["context"]:
            local_logits = logits[:, index, :vocab_size].to("cpu", torch.float64).numpy()
        pipeline_rank = layout.pipeline_rank_of_stage[layout.n_stages - 1]
        last = layout.rank_of(pipeline=pipeline_rank, context=context_rank)
        result = self.world.broadcast(local_logits, source=last)
        assert result is not None  # the last stage's rank sends logits
        return result

    def _reshard_weights(self) -> None:
        """Free all-gathered weights: leave parameters sharded, as a step's backward pass does."""
        if not self.plan.layout.zero:
            return
        for module in self._wrapped.values():
            for unit in module.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()

    # -- numbers and tensors --------------------------------------------------------------------

    def _train(self, training: bool) -> None:
        for module in (*self._wrapped.values(), *self.models):
            if module.training != training:
                module.train(training)

    @property
    def _n_evaluated(self) -> int:
        """Micro-batches in an evaluation batch: enough to keep every rank in a pipeline busy."""
        return self.plan.layout.pipeline

    def _over_rows(self, count: int) -> Tensor | int:
        """Sum a count over all rows of the global batch, given this rank's count."""
        if self.world.size == 1:
            return count
        others = self._coordinates.keys() - BATCH_DIMENSIONS
        counts = not any(self._coordinates[name] for name in others)
        own = torch.full((), count if counts else 0, dtype=torch.float64, device=self.device)
        total = self._sum_over_world(own)
        return total if isinstance(total, Tensor) else round(total)

    def _loss_factor(self, loss_scale: float, n_targets: Tensor | int) -> Tensor | float:
        """Return the number by which a summed loss is multiplied before its backward pass, in the
        weights' dtype if it is a tensor, 0-dim: float64 would spread to all that follows."""
        if not isinstance(n_targets, Tensor):
            return loss_scale / max(1, n_targets)
        factor = loss_scale / n_targets.clamp(min=1)
        return factor.to(self.arithmetic.weights)

    def _sum_loss_over_world(self, own: Tensor) -> Tensor | float:
        """Sum a loss, 0-dim or (1,), over all ranks; vocabulary-parallel ranks, which all have the
        same sum, count once."""
        counts = not any(self._coordinates[name] for name in self.plan.sharding.loss_copies)
        return self._sum_over_world(own if counts else torch.zeros_like(own))

    def _sum_over_world(self, own: Tensor) -> Tensor | float:
        """Sum a number, 0-dim or (1,) and this rank's to use up, over all ranks; 0-dim float64 if
        it stays on the device."""
        if self.world.size > 1:
            own = own.to(torch.float64)
            dist.all_reduce(own)
        return own.reshape(()).to(torch.float64) if self.host_waits else own.item()

    def _to_device(self, batch: Batch) -> tuple[Tree, Tree]:
        """Return inputs and targets (B, …) at this rank's positions, on the device."""
        inputs, targets = (
            map_leaves(self._local_positions, each) for each in (batch.inputs, batch.targets)
        )
        return inputs, targets

    def _local_positions(self, array: np.ndarray) -> Tensor:
        """Copy this rank's positions of an array (B, T) to the device, or all of an array (B, …)
        without context parallelism. Floats get the weights' dtype."""
        if self.plan.layout.context > 1:
            array = np.concatenate([array[:, each.start : each.stop] for each in self._chunks], 1)
        tensor = torch.from_numpy(array)
        if tensor.is_floating_point():
            tensor = tensor.to(self.arithmetic.weights)
        return self._copy_to_device(tensor)

    def _keys(self, step: int, rows: np.ndarray) -> Tensor | None:
        """Return the randomness of rows (B,) at a step: dropout keys (B, …) on the device, or seeds
        (B,) on the host, which reads them; None if nothing is random."""
        keys = self.source.row_keys(self.plan, step, rows, self._attention_rows[: len(rows)])
        if keys is None or self.source.draws_from_generator:  # the host reads seeds
            return keys
        return self._copy_to_device(keys)

    def _copy_to_device(self, tensor: Tensor) -> Tensor:
        """Copy `tensor` to the device, same shape. It is pinned first, so that a GPU's host need
        not wait."""
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def micro_batches(n_rows: int, micro_batch_size: int) -> Iterator[slice]:
    """Yield each micro-batch's rows as a slice, in order."""
    for start in range(0, n_rows, micro_batch_size):
        yield slice(start, start + micro_batch_size)


def _local_gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    """Return the local shards of the gradients that exist."""
    return [gradients.local(p.grad) for p in parameters if p.grad is not None]
