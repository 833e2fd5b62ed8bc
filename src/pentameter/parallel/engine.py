"""The Engine: one rank's share of a step, which a trainer drives whatever the layout."""

from __future__ import annotations

import contextlib
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

from pentameter.data.batches.step import IGNORED, Batch
from pentameter.data.batches.tree import Tree, leaves, map_leaves
from pentameter.errors import ConfigError
from pentameter.parallel import gradients
from pentameter.parallel.data_parallel import micro_batch
from pentameter.parallel.model_source import ModelSource
from pentameter.parallel.pipeline import Pipeline
from pentameter.parallel.precision import arithmetic
from pentameter.parallel.rounded_weights import rounded_weights
from pentameter.parallel.shared_parameters import TiedCopies
from pentameter.parallel.stage_module import StageModule
from pentameter.planning.plan import Plan
from pentameter.processes.world import World


@dataclass(frozen=True)
class LossSum:
    """A summed loss in nats and the count of target tokens it is summed over; `mean` is the number
    everything reports."""

    total: float
    n_targets: int

    @property
    def mean(self) -> float:
        """Nats per target token; NaN over no targets."""
        return self.total / self.n_targets if self.n_targets else float("nan")

    def __add__(self, other: LossSum) -> LossSum:
        return LossSum(self.total + other.total, self.n_targets + other.n_targets)


class Engine:
    """One rank's slices of the model and how to run a batch through them.

    `stage_modules` are the slices that `source` gave, in order, and `wrapped` what runs them, by
    stage number: a stage module, or DDP around one. Methods are collective: every process of the
    world calls them with the same arguments but for the rows of the batch.
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
        # Walking the modules for them takes a GPU's host as long as launching a small step.
        every = (pair for model in self.models for pair in model.named_parameters())
        self._named = list({id(parameter): (name, parameter) for name, parameter in every}.values())
        self._rounded = rounded_weights(source, self.models, plan, self.precision)
        self._pipeline: Pipeline | None = None
        self._tied: TiedCopies | None = None
        if mesh is not None and plan.layout.pipeline > 1:
            collect = self._rounded.collect
            self._pipeline = Pipeline(wrapped, stage_modules[0], plan, mesh, collect)
            self._tied = TiedCopies(plan, mesh, world, dict(self._named))
        places = plan.layout.coordinates(world.rank)
        self._places = places
        self._pieces = plan.layout.positions(places["context"], plan.config.model.context_length)

    # -- what it consists of --------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model where the layout has no pipeline, its parameters sharded or not; `models` has
        the slices of a pipeline. Raises ConfigError where there is one."""
        if self._pipeline is not None:
            raise ConfigError(
                f"with parallel.pipeline={self.plan.layout.pipeline} no process has the whole "
                "model; engine.models are the slices of this one"
            )
        (stage_module,) = self.stage_modules
        return stage_module.model

    @property
    def models(self) -> list[nn.Module]:
        """The slices of the model that this process has."""
        return [each.model for each in self.stage_modules]

    @property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh of the layout; None where there is one process and nothing is sharded."""
        return self._mesh

    @property
    def precision(self) -> str:
        """The precision of the matrix products, a value of `train.precision`."""
        return self.stage_modules[0].precision

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The arithmetic of the run's precision, for a forward pass of `model`."""
        return self.stage_modules[0].autocast()

    @property
    def is_whole(self) -> bool:
        """True if each process has the whole model, and can use it without the others."""
        layout = self.plan.layout
        return layout.pipeline == layout.tensor == layout.context == 1 and not layout.zero

    @property
    def rows(self) -> np.ndarray:
        """Row numbers in the global batch, int64, that this process computes."""
        rows = self.plan.layout.rows(self.world.rank, self.plan.batch_size)
        return np.arange(rows.start, rows.stop, dtype=np.int64)

    @property
    def _attention_rows(self) -> np.ndarray:
        """The same of the rows whose heads this process computes."""
        rows = self.plan.layout.attention_rows(self.world.rank, self.plan.batch_size)
        return np.arange(rows.start, rows.stop, dtype=np.int64)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Parameters by the names of the parameter table, a copy of a tied one included."""
        yield from self._named

    def owned_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Those of `named_parameters` without copies of what another stage owns."""
        for name, parameter in self.named_parameters():
            if self._tied is None or name not in self._tied.copies:
                yield name, parameter

    @property
    def adds_up_in_place(self) -> bool:
        """True if gradients are zeroed in place instead of set to None: as views of DDP's buckets
        they would else be held twice, and of a replayed graph's own be written over."""
        if self._mesh is None:
            return any(module.replays for module in self.stage_modules)
        return self.plan.rules.adds_up_in_buckets(self.plan.n_micro_batches)

    def parameters(self) -> Iterable[Parameter]:
        """Parameters in the order of `named_parameters`."""
        return [parameter for _, parameter in self._named]

    # -- the step -------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, step: int, *, loss_scale: float = 1.0) -> LossSum:
        """The step's loss over all processes; its gradients, times `loss_scale`, are in the
        parameters' `.grad`.

        `batch` holds this process's `rows`. Each micro-batch contributes its summed loss over the
        count of targets of the whole step, known before the first backward pass, so accumulation
        is exact whatever micro-batches and processes hold.
        """
        self._train(True)
        n_targets = self._over_rows(batch.n_targets)
        factor = loss_scale / max(1, n_targets)
        inputs, targets = self._to_device(batch)
        keys = self._keys(step, batch.rows)
        with self._rounded:
            if self._pipeline is not None:
                n_parts = len(batch.rows) // self.plan.micro_batch_size
                total = self._pipeline.train(inputs, targets, keys, factor, n_parts)
            else:
                total = self._accumulate(inputs, targets, keys, factor)
        self._settle()
        return LossSum(self._loss_over_world(total), n_targets)

    def _accumulate(
        self, inputs: Tree, targets: Tree, keys: Tensor | None, factor: float
    ) -> Tensor:
        """Run forward and backward of one micro-batch after another; the summed loss, ()."""
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

    def _settle(self) -> None:
        """Do the sums of gradients that the backward pass has not: over sequence, data and tied
        copies. A parameter that had no part in the loss has a gradient of zero, wherever it is."""
        for parameter in self.parameters() if self.source.may_leave_unused else ():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._mesh is None:
            return
        rules = self.plan.rules
        gradients.placed_as_parameters(self.parameters())
        for dimension in rules.sums_copies_over:
            # DTensor itself sums what lies on its mesh as a copy; in other modes nobody does yet.
            in_1d = self.plan.layout.tensor_mode == "1d"
            is_done = gradients.lies_on if in_1d else gradients.is_divided
            whole = [p for p in self.parameters() if not is_done(p, dimension)]
            gradients.add_up(_local_gradients(whole), self._mesh[dimension].get_group())
        if rules.data_sum == "after_backward":
            group = self._mesh["data"].get_group()
            gradients.add_up(_local_gradients(self.parameters()), group)
        if self._tied is not None:
            self._tied.add_up()

    def gradient_norm(self) -> Tensor:
        """The Euclidean norm of the gradient, 0-dim, the same number in every process."""
        if self._mesh is None:
            return gradients.norm_here(self.parameters())
        owned = [parameter for _, parameter in self.owned_parameters()]
        return gradients.global_norm(owned, self._mesh)

    def unscale_gradients(self, scale: float) -> None:
        """Divide every gradient by the loss scale, in place."""
        gradients.unscale(self.parameters(), scale)

    def clip_gradients(self, norm: Tensor, limit: float) -> None:
        """Shrink all gradients together so that their norm, now `norm`, is at most `limit`; a
        limit of 0 does not clip."""
        gradients.clip(self.parameters(), norm, limit)

    def zero_gradients(self) -> None:
        """Set every `.grad` to None, or zero it where it is added to in place."""
        held = [p.grad for p in self.parameters() if p.grad is not None]
        if self.adds_up_in_place and held:
            torch._foreach_zero_(held)
            return
        for parameter in self.parameters():
            parameter.grad = None

    # -- without gradients ----------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> LossSum:
        """The loss of a whole batch, which processes share out, without dropout.

        Raises ConfigError where they cannot: rows are missing, and targets that are no integers
        cannot say that they do not count.
        """
        self._train(False)
        own = self._own_rows(batch)
        inputs, targets = self._to_device(own)
        if self._pipeline is not None:
            total = self._pipeline.evaluate(inputs, targets, self._n_evaluated)
        else:
            (stage_module,) = self.stage_modules
            total = stage_module(inputs, targets).sum()
        self._give_up_gathered()
        return LossSum(self._loss_over_world(total), batch.n_targets)

    def _own_rows(self, batch: Batch) -> Batch:
        """This process's rows of an evaluation batch: as many as every other's, the missing ones
        filled up with copies of the first row that count nothing."""
        n_parts = self.plan.layout.n_row_parts
        n_rows = -(-len(batch.rows) // (n_parts * self._n_evaluated)) * self._n_evaluated
        first = self.plan.layout.data_index(self.world.rank) * n_rows
        rows = np.arange(first, first + n_rows, dtype=np.int64)
        is_missing = rows >= len(batch.rows)
        taken = np.where(is_missing, 0, rows)
        every = n_parts * n_rows
        if every > len(batch.rows) and any(
            array.dtype.kind not in "iu" for array in leaves(batch.targets)
        ):
            raise ConfigError(
                f"an evaluation of {len(batch.rows)} rows over {n_parts * self._n_evaluated} parts "
                f"takes rows that do not count, and only integer targets can be {IGNORED}; "
                f"evaluate a multiple, {every} rows"
            )

        def targets_of(array: np.ndarray) -> np.ndarray:
            own: np.ndarray = array[taken]
            own[is_missing] = IGNORED
            return own

        inputs = map_leaves(itemgetter(taken), batch.inputs)
        return Batch(inputs, map_leaves(targets_of, batch.targets), rows)

    @torch.no_grad()
    def next_logits(self, text: np.ndarray) -> np.ndarray:
        """Logits (B, V) of the token after text (B, n), n ≤ context_length, in every process,
        float64.

        The way to sample from a model that no process has whole: each token takes a forward pass
        over the whole context.
        """
        self._train(False)
        T = self.plan.config.model.context_length
        n_seen = text.shape[1]
        filled = np.zeros((len(text), T), dtype=np.int64)  # what follows is not seen
        filled[:, :n_seen] = text
        tokens = self._of_own_time(filled)
        if self._pipeline is not None:
            logits = self._pipeline.logits(tokens)
        else:
            (stage_module,) = self.stage_modules
            logits = stage_module(tokens)
        self._give_up_gathered()
        vocab_size = self.plan.config.model.vocab_size
        layout = self.plan.layout
        place, index = layout.holder(n_seen - 1, T)
        own = None
        if logits is not None and place == layout.coordinates(self.world.rank)["context"]:
            own = logits[:, index, :vocab_size].to("cpu", torch.float64).numpy()
        end = layout.place_of_stage[layout.n_stages - 1]
        last = layout.rank_of(pipeline=end, context=place)
        result = self.world.broadcast(own, source=last)
        assert result is not None  # the last stage has logits
        return result

    def _give_up_gathered(self) -> None:
        """Free gathered weights: leave the parameters sharded, as a step's backward pass does."""
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
        """Micro-batches of an evaluation batch: enough to keep every process of a pipeline busy."""
        return self.plan.layout.pipeline

    def _over_rows(self, count: int) -> int:
        """The sum of a count over all rows of the global batch, given that of this rank's rows."""
        speaks = not any(self._places[name] for name in ("context", "tensor", "pipeline"))
        return round(self._over_world(float(count) if speaks else 0.0))

    def _loss_over_world(self, own: Tensor) -> float:
        """The sum of a loss over all ranks, that of processes which share a vocabulary once."""
        sharing = self.plan.layout.divided_axes.get("vocab", ())
        speaks = not any(self._places[name] for name in sharing)
        return self._over_world(own.item() if speaks else 0.0)

    def _over_world(self, value: float) -> float:
        """The sum of a value over all ranks."""
        if self.world.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total.item())

    def _to_device(self, batch: Batch) -> tuple[Tree, Tree]:
        """Inputs and targets of this process's positions, on the device."""
        inputs, targets = (
            map_leaves(self._of_own_time, each) for each in (batch.inputs, batch.targets)
        )
        return inputs, targets

    def _of_own_time(self, array: np.ndarray) -> Tensor:
        """The positions of an array (B, T) that this process computes, on the device; all of an
        array (B, …) where no sequence is split. Floats get the dtype of the weights."""
        if self.plan.layout.context > 1:
            array = np.concatenate([array[:, each.start : each.stop] for each in self._pieces], 1)
        tensor = torch.from_numpy(array)
        if tensor.is_floating_point():
            tensor = tensor.to(arithmetic(self.precision).weights)
        return self._copied(tensor)

    def _keys(self, step: int, rows: np.ndarray) -> Tensor | None:
        keys = self.source.row_keys(self.plan, step, rows, self._attention_rows[: len(rows)])
        if keys is None or self.source.draws_from_generator:  # seeds, which the host reads
            return keys
        return self._copied(keys)

    def _copied(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device; out of pinned memory, a GPU's host need not wait for it."""
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def micro_batches(n_rows: int, micro_batch_size: int) -> Iterator[slice]:
    """The rows of each micro-batch, in order."""
    for start in range(0, n_rows, micro_batch_size):
        yield slice(start, start + micro_batch_size)


def _local_gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    return [gradients.local(p.grad) for p in parameters if p.grad is not None]
