"""Proof that the graph which `torch.compile` makes of a whole model on a CPU computes what the
model computes, before a run believes it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from pentameter.data.batches.step import TrainingBatches
from pentameter.machine.kernel_checks import bound_of, disagreement
from pentameter.parallel.engine import Engine, keeping_buffers
from pentameter.parallel.local_shards import local_shard
from pentameter.parallel.stage_module import StageModule
from pentameter.train.user_components import CustomBatches

SMALL_GRADIENT = 1 / 8
"""A parameter's gradient whose size is below this fraction of the largest gradient is compared as
if it had that size. The gradient of a bias before batch norm, or of attention's keys, is 0 but for
rounding: two correct computations have nothing in common there, and differed by 10⁻⁷ of the
largest."""


def refuse_wrong_graphs(
    engine: Engine, batches: TrainingBatches | CustomBatches, step: int
) -> str | None:
    """Compute loss and gradients of a micro-batch of `step` with the engine's compiled graphs and,
    on a CPU, eagerly. If a graph cannot be made on any rank, or the results differ by more than
    rounding, all ranks train eagerly from now on.

    Return a phrase that says why the graphs are refused, or None: they are right, there are none,
    or the run is complete and has no batch of `step`. Collective. Results are dropped, so it costs
    a micro-batch or two at each start; the compiled code is kept.
    """
    graphs = [each for each in engine.stage_modules if each.has_graph]
    plan, rows = engine.plan, engine.rows
    if not graphs or step >= plan.steps:
        return None
    if plan.layout.pipeline == 1:  # with a pipeline it takes several to run
        rows = rows[: plan.micro_batch_size]
    batch = batches.batch(step, rows)

    def computed() -> list[Tensor]:
        loss = engine.forward_backward(batch, step)
        gradients = [each.grad for each in engine.parameters() if each.grad is not None]
        return [torch.as_tensor(loss.total), *(local_shard(each)[0] for each in gradients)]

    with contextlib.ExitStack() as stack:
        stack.enter_context(keeping_buffers(engine.models))
        compiled = computed()
        obstacles = [each.graph_obstacle for each in graphs]
        reason = engine.world.first(next(filter(None, obstacles), None))
        if reason or engine.device.type != "cpu":
            engine.zero_gradients()
            return reason and _eager(graphs, f"cannot make a graph of the model ({reason})")
        compiled = [each.clone() for each in compiled]
        engine.zero_gradients()
        for module in graphs:
            stack.enter_context(module.plainly())
        plain = computed()
    # The errors of a graph were a tenth of one kernel's bound, for 4 layers as for 16.
    bound = bound_of(engine.arithmetic.products)
    least_top = SMALL_GRADIENT * max(engine.world.all_gather(_largest(plain[1:])))
    wrong = disagreement(compiled, plain, bound=bound, least_top=least_top)
    engine.zero_gradients()
    reason = engine.world.first(wrong)
    return reason and _eager(
        graphs, f"makes a graph that computes other gradients than the model ({reason})"
    )


def _eager(modules: Sequence[StageModule], why: str) -> str:
    """Have the modules train eagerly from now on. Return a phrase that says so, with the reason
    `why`."""
    for module in modules:
        module.run_plain()
    return f"torch.compile {why}, so this run is not compiled"


def _largest(tensors: Sequence[Tensor]) -> float:
    """Return the largest absolute value in the tensors that is finite; 0 if there is none."""
    return max((float(x.nan_to_num(0, 0, 0).abs().amax()) for x in tensors if x.numel()), default=0)
