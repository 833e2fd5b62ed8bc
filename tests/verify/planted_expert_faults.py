"""Errors that other trainers have had with mixtures of experts, planted here. A worker calls one
before it computes, as those in planted_faults.py. docs/twenty-four-errors.md says where each was.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from planted_faults import plant
from torch.distributed.fsdp import FSDPModule

from pentameter.model import experts
from pentameter.model.loss import AuxiliaryLoss, _JoinedLoss
from pentameter.parallel import data_parallel, engine, gradients
from pentameter.parallel.experts import expert_parallel
from pentameter.parallel.experts.balance import RouterBalance
from pentameter.parallel.memory import recomputation
from pentameter.parallel.mesh import Mesh
from pentameter.parallel.sources import gpt_source
from pentameter.parallel.tensor import tensor_parallel
from pentameter.planning.layouts.layout import EXPERT_DIMENSIONS

# -- gradients of what experts read ---------------------------------------------------------------


def rows_of_one_shard() -> None:
    """Rows go to every rank with a shard of their expert, and get the gradient of the first."""

    def for_each_shard(self, rows, n_sent):
        *blocks, _ = rows.split([*n_sent[:: self.n_shards], len(rows) - sum(n_sent) // 2])
        return torch.cat([each for block in blocks for each in (block, block.detach())])

    plant(expert_parallel.ExpertExchange, "_for_each_shard", for_each_shard)


def gradient_of_own_tokens() -> None:
    """Below the experts, a rank has the gradient of the tokens whose experts it computed."""

    def backward(ctx, g):
        whole = g.new_zeros(ctx.n_rows, *g.shape[1:])
        ctx.shards.shard_of(whole).copy_(g)
        return whole, None

    plant(expert_parallel._Shard, "backward", staticmethod(backward))


def key_of_own_heads() -> None:
    """Ranks with other heads add no gradient to the rotated key that all heads share."""
    gather = tensor_parallel._gather

    def without_key(context, *parts):
        *latents, _ = gather(context, *parts)
        return *latents, parts[-1]

    plant(tensor_parallel, "_gather", without_key)


def router_behind_a_gather() -> None:
    """The router's weights pass a collective that has no backward pass."""

    def detached(self, x, routing):
        weights = self.shard_of(routing.weights.detach())
        own = replace(routing, experts=self.shard_of(routing.experts), weights=weights)
        return expert_parallel._Shard.apply(x, self), own

    plant(expert_parallel.TokenShards, "shard", detached)


def no_gradient_without_rows() -> None:
    """A rank whose experts get no row leaves them out, and they keep no gradient at all."""
    by_expert = expert_parallel.ExpertExchange._by_expert

    def of_rows(self, compute, arrived, *counts):
        return by_expert(self, compute, arrived, *counts) if len(arrived) else arrived

    plant(expert_parallel.ExpertExchange, "_by_expert", of_rows)


# -- what experts compute -------------------------------------------------------------------------


def bias_of_each_shard() -> None:
    """Every rank with a shard of an expert adds its whole bias before their results are added."""
    on_shards = expert_parallel._on_shards

    def added(matmul, linear, adds_bias, x, groups):
        return on_shards(matmul, linear, True, x, groups)

    plant(expert_parallel, "_on_shards", added)


def places_in_one_row() -> None:
    """Ranks take parts of every row's tokens, and put them back as parts of one long row."""
    forward = experts.Experts.forward

    def remembered(self, x, *rest):
        expert_parallel.TokenShards.n_times = x.shape[1]
        return forward(self, x, *rest)

    def by_time(self, whole):
        rows = whole.unflatten(0, (-1, self.n_times))
        return rows.chunk(self.n, dim=1)[self.rank].flatten(0, 1)

    plant(experts.Experts, "forward", remembered)
    plant(expert_parallel.TokenShards, "shard_of", by_time)


def routing_that_is_recomputed() -> None:
    """The second forward pass of recomputation chooses again, and otherwise."""
    plant(recomputation, "_ROUTING_NAMES", ())
    routing_that_varies()


def routing_that_varies() -> None:
    """Who chooses a second time from the same scores gets other experts, as where scores are equal,
    or differ by rounding."""
    best, seen = experts._best, set()

    def other_at_second_sight(numbers, n):
        key = float(numbers.sum())
        first = 1 if key in seen else 0
        seen.add(key)
        return best(numbers, n + first)[..., first:]

    plant(experts, "_best", other_at_second_sight)


# -- gradients of experts, and their norm ---------------------------------------------------------


def mean_over_the_experts_own_ranks() -> None:
    """FSDP takes means, which the loss's factor undoes for as many ranks as there are; experts are
    sharded over fewer."""
    fully_shard, divide = data_parallel.fully_shard, FSDPModule.set_gradient_divide_factor

    def sharded(unit, mesh, **options):
        unit.n_averaged = mesh.size()
        return fully_shard(unit, mesh=mesh, **options)

    def mean(self, factor):
        divide(self, factor * self.n_averaged / dist.get_world_size())

    plant(data_parallel, "fully_shard", sharded)
    plant(FSDPModule, "set_gradient_divide_factor", mean)


def scaled_by_replicas() -> None:
    """Experts' gradients are multiplied by their replicas ÷ those of everything else."""
    reduce = engine.Engine._reduce_gradients

    def and_scale(self):
        reduce(self)
        layout = self.plan.layout
        for parameter in self.parameters():
            if gradients.lies_on(parameter, "expert"):
                parameter.grad.mul_(layout.expert_sizes["expert_data"] / layout.data)

    plant(engine.Engine, "_reduce_gradients", and_scale)


def experts_summed_over_data() -> None:
    """Experts' gradients are added over the ranks that hold replicas of everything else."""
    along = Mesh.along

    def of_the_rest(self, *dimensions):
        return along(self, *("data" if name == "expert_data" else name for name in dimensions))

    plant(Mesh, "along", of_the_rest)


def norm_by_the_tensor_rank() -> None:
    """The norm counts what the first tensor-parallel rank holds, and of experts no other's."""
    counts = gradients._counts_here

    def counts_here(parameter, meshes):
        is_first = meshes[0].get_local_rank("tensor") == 0
        is_expert = any(gradients.lies_on(parameter, name) for name in EXPERT_DIMENSIONS[1:])
        return counts(parameter, meshes) and (is_first or not is_expert)

    plant(gradients, "_counts_here", counts_here)


# -- balance --------------------------------------------------------------------------------------


def counts_of_one_tensor_rank() -> None:
    """Counts are summed over data, and not over the tensor-parallel ranks that split sequences."""
    summed_over = RouterBalance._summed_over

    def without_tensor(self):
        return tuple(name for name in summed_over(self) if name != "tensor")

    plant(RouterBalance, "_summed_over", without_tensor)


def balance_until_a_dense_layer() -> None:
    """The update of the routers ends at the first layer that has none."""
    make = RouterBalance.__init__

    def until_dense(self, models, plan, mesh):
        make(self, models, plan, mesh)
        kept = {}
        for model in models:
            for number, block in model.blocks.items():
                if not hasattr(block, "experts"):
                    break
                name = f"blocks.{number}.experts.router.balance"
                kept[name] = self._routers[name]
        self._routers = kept

    plant(RouterBalance, "__init__", until_dense)


def losses_divided_by_ranks() -> None:
    """Each rank takes the mean over its own tokens for one over the step's."""
    start = AuxiliaryLoss.start_step
    plant(
        AuxiliaryLoss,
        "start_step",
        lambda self, factor: start(self, factor / dist.get_world_size()),
    )


def loss_divided_by_rows() -> None:
    """A sequence's loss is divided by the rows of its micro-batch once more."""
    losses = experts.Router._loss

    def per_row(self, logits, *rest):
        loss = losses(self, logits, *rest)
        return loss if loss is None else loss / len(logits)

    plant(experts.Router, "_loss", per_row)


def loss_of_each_pass() -> None:
    """Each forward pass enters its loss; recomputation makes two."""
    start = AuxiliaryLoss.start_step

    def start_step(self, factor):
        start(self, factor)
        self.n_passes = 0

    def forward(self, x, loss):
        self.n_passes += 1
        return _JoinedLoss.apply(x, loss, self.factor * self.n_passes, self.total)

    plant(AuxiliaryLoss, "start_step", start_step)
    plant(AuxiliaryLoss, "forward", forward)


def loss_on_no_path() -> None:
    """What carries the loss's gradient is computed, and its result thrown away."""
    plant(AuxiliaryLoss, "forward", lambda self, x, loss: x)


def loss_without_gradient() -> None:
    """The loss is computed from scores that have left the graph."""
    loss = experts.Router._loss

    def constant(self, logits, scores, chosen):
        return loss(self, logits.detach(), scores.detach(), chosen)

    plant(experts.Router, "_loss", constant)


def loss_of_joined_layers() -> None:
    """A layer's tokens are counted together with those of the layer before, if that is here."""

    def count_joined(model, groups):
        last = []
        for module in model.modules():
            if isinstance(module, experts.Router):
                module.count_sequence = joined

        def forget(*_):
            last.clear()

        model.register_forward_pre_hook(forget)
        count_joined.last = last

    def joined(counts):
        last = count_joined.last
        total = counts + sum(last)
        last[:] = [counts]
        return total

    plant(gpt_source, "count_whole_sequences", count_joined)


def mean_over_the_layers_of_a_stage() -> None:
    """The loss is a mean over layers, and a stage divides by those that it has."""
    make = engine.Engine.__init__

    def scaled(self, *arguments):
        make(self, *arguments)
        n_whole, n_here = self.plan.config.model.n_layers, len(self._auxiliary_losses)
        for each in self._auxiliary_losses:
            start = each.start_step
            each.start_step = lambda factor, start=start: start(factor * n_whole / n_here)

    plant(engine.Engine, "__init__", scaled)
