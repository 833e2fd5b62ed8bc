"""Pipeline parallelism: layers split into stages on different ranks, driven by PyTorch's schedules.

Shapes: n micro-batches, B rows in each, T this rank's tokens, D d_model, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pentameter.config.choices import TAKES_SEVERAL_STAGES, look_up
from pentameter.parallel.stage_module import StageModule
from pentameter.planning.architecture import residual_stream
from pentameter.planning.plan import Plan
from pentameter.tree import Tree, leaves

if TYPE_CHECKING:  # it imports PyTorch's compiler, which runs without a pipeline need not load
    from pentameter.parallel.pipeline.bounded_stage import BoundedStage

Use = Literal["train", "evaluate", "rows", "logits"]


class Pipeline:
    """Runs this rank's pipeline stages, and exchanges activations and gradients with other ranks.

    `modules` maps stage numbers to this rank's modules, each a stage module, or DDP around it.
    `module` is one stage module without DDP, from which device and dtypes are taken. `plan` has the
    layout, the schedule and batch sizes. `group` has the ranks along `pipeline`. Every rank in it
    creates one Pipeline, and methods are collective over it. `take_gradients` is called after each
    weight-gradient half in a split backward pass.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        module: StageModule,
        plan: Plan,
        group: dist.ProcessGroup,
        take_gradients: Callable[[], None],
    ) -> None:
        self._take_gradients = take_gradients
        self._modules = modules
        self._plan = plan
        self.group = group
        self._device = module.device
        self._arithmetic = module.arithmetic
        # StageModule does not round logits, unless sharded.
        self._logits_dtype = self._arithmetic.weights
        if plan.layout.zero:
            self._logits_dtype = self._arithmetic.products
        self._holds_first = 0 in modules
        self._reads_inputs = any(
            isinstance(each, StageModule) and each.reads_inputs for each in modules.values()
        )
        self._schedules: dict[tuple[object, ...], tuple[Any, list[BoundedStage]]] = {}
        self._factor: Tensor | float = 1.0
        self._losses: list[Tensor] = []

    def train(
        self, inputs: Tree, targets: Tree, keys: Tensor | None, factor: Tensor | float
    ) -> Tensor:
        """Run forward and backward over the step's n micro-batches; inputs and targets are
        (n · B, …), dropout `keys` (n · B, …) or None. Returns the summed loss in nats, (), or zero
        on a rank without the last stage. The gradients of that loss times `factor`, a number or
        0-dim tensor, are added to the parameters' `.grad`."""
        self._factor = factor
        n_micro_batches = len(leaves(inputs)[0]) // self._plan.micro_batch_size
        schedule, stages = self._schedule(
            "train", self._plan.layout.schedule, inputs, n_micro_batches
        )
        self._run(schedule.step, inputs, targets, keys)
        return self._collect_losses(stages).sum()

    def evaluate(self, inputs: Tree, targets: Tree) -> Tensor:
        """Compute the summed loss in nats, (), for inputs and targets (n · B, …), without
        gradients; zero on a rank without the last stage. n is the number of pipeline ranks, which
        must divide the rows: as many micro-batches keep every rank busy."""
        return self._evaluate("evaluate", inputs, targets).sum()

    def row_losses(self, inputs: Tree, targets: Tree) -> Tensor:
        """Compute each batch row's summed loss in nats, (n · B,), without gradients, in n
        micro-batches, one per pipeline rank; zeros on a rank without the last stage."""
        losses = self._evaluate("rows", inputs, targets)
        return losses if len(losses) else losses.new_zeros(len(leaves(targets)[0]))

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Compute logits (B, T, V) for one micro-batch of token ids (B, T); None on a rank without
        the last stage."""
        schedule, stages = self._schedule("logits", self._forward_only, tokens, 1)
        arguments = (tokens,) if self._holds_first else ()
        context = {"inputs": tokens} if self._reads_inputs else {}
        result: Tensor | None = schedule.step(*arguments, **context)
        _end(stages)
        return result

    def _evaluate(self, use: Use, inputs: Tree, targets: Tree) -> Tensor:
        """Run forward passes alone, in one micro-batch per pipeline rank, and return their losses:
        one per micro-batch, (n,), or per row, (n · B,), if the use is `rows`; an empty tensor on a
        rank without the last stage."""
        n_micro_batches = self._plan.layout.pipeline
        schedule, stages = self._schedule(use, self._forward_only, inputs, n_micro_batches)
        self._run(schedule.eval, inputs, targets, None, by_row=use == "rows")
        return self._collect_losses(stages)

    def _run(
        self,
        run: Callable[..., Any],
        inputs: Tree,
        targets: Tree,
        keys: Tensor | None,
        *,
        by_row: bool = False,
    ) -> None:
        """Run one step of a schedule: call `run`, its `step` or `eval`, on inputs, targets and
        dropout keys (n · B, …), which it splits into n micro-batches. `keys` None means no dropout.
        With `by_row`, the last stage computes a loss for each row."""
        arguments = (inputs,) if self._holds_first else ()
        context = {"targets": targets}
        if by_row:
            context["by_row"] = True
        if keys is not None:
            context["dropout_keys"] = keys
        if self._reads_inputs:
            context["inputs"] = inputs
        # PyTorch requires a tensor, which `_loss` ignores.
        run(*arguments, target=leaves(targets)[0], **context)

    def _loss(self, loss: Tensor, _targets: Tensor) -> Tensor:
        """Loss function for PyTorch's schedule: record the loss that the last stage computed for a
        micro-batch, (1,), or for each of its rows, (B,). Return its sum times the step's factor,
        (), from which the backward pass starts."""
        self._losses.append(loss.detach())
        return loss.sum() * self._factor

    def _collect_losses(self, stages: list[BoundedStage]) -> Tensor:
        """End the step, and return its recorded losses, concatenated in micro-batch order, which
        every schedule keeps: (n,) or (n · B,); empty on a rank without the last stage."""
        _end(stages)
        losses, self._losses = self._losses, []
        return torch.cat(losses) if losses else torch.zeros(0, device=self._device)

    @property
    def _forward_only(self) -> str:
        """Name of the schedule for passes without gradients: this layout's, if it can have several
        stages per rank (`interleaved`, `zero-bubble`, `zero-bubble-v`); for `1f1b` and `gpipe` it
        is `gpipe`, which takes any number of micro-batches."""
        name = self._plan.layout.schedule
        return name if _takes_several_stages(name) else "gpipe"

    def _schedule(
        self, use: Use, name: str, inputs: Tree, n_micro_batches: int
    ) -> tuple[Any, list[BoundedStage]]:
        """Return PyTorch's schedule `name` (a `parallel.schedule`) for a use (`train`, `evaluate`,
        `rows` or `logits`), the inputs' shapes and `n_micro_batches`, and this rank's stages in it;
        created at the first such call, then cached.

        A schedule's shapes are fixed for its life, and so is whether received tensors have a
        gradient, which the first step settles. Schedules hold no parameters.
        """
        from pentameter.parallel.pipeline.bounded_stage import SCHEDULES

        # The shapes for one micro-batch; batch rows come first.
        on_meta = [
            torch.empty(
                (len(each) // n_micro_batches, *each.shape[1:]), dtype=each.dtype, device="meta"
            )
            for each in leaves(inputs)
        ]
        shapes = tuple((each.shape, each.dtype) for each in on_meta)
        key = (use, name, n_micro_batches, shapes)
        if key not in self._schedules:
            stages = [
                self._stage(use, name, number, module, on_meta)
                for number, module in self._modules.items()
            ]
            schedule = SCHEDULES[name](
                stages if _takes_several_stages(name) else stages[0],
                n_micro_batches,
                loss_fn=None if use == "logits" else self._loss,
                scale_grads=False,  # the loss is divided by the global target count
            )
            self._schedules[key] = schedule, stages
        return self._schedules[key]

    def _stage(
        self, use: Use, schedule: str, number: int, module: nn.Module, inputs: Sequence[Tensor]
    ) -> BoundedStage:
        """Create PyTorch's stage object for stage `number`, which runs `module`.

        use: what is computed: `train`, `evaluate`, `rows` or `logits`. The last stage's output has
            its shape: logits for `logits`, a loss per row for `rows`, else one loss.
        schedule: a `parallel.schedule`.
        inputs: the first stage's inputs for one micro-batch, (B, …), on `meta`.
        """
        from pentameter.parallel.pipeline.bounded_stage import stage_class

        plan, layout = self._plan, self._plan.layout
        micro_batch_size = len(inputs[0])
        (T,) = plan.sharding.local_shape((plan.config.model.context_length,), ("context",))
        has_loss = use != "logits"
        on_meta: dict[str, Any] = {"device": "meta"}
        stream = torch.empty(
            micro_batch_size,
            *plan.sharding.local_shape(
                residual_stream(plan.config.model, "stream").shape, ("message", "embed")
            ),
            dtype=self._arithmetic.stream if use == "train" else self._arithmetic.weights,
            requires_grad=has_loss,
            **on_meta,
        )
        if has_loss:  # summed losses are fp32 or fp64
            n_losses = micro_batch_size if use == "rows" else 1
            dtype = self._arithmetic.weights
            output = torch.empty(n_losses, dtype=dtype, requires_grad=True, **on_meta)
        else:
            shape = (micro_batch_size, T, plan.vocab_size_padded)
            output = torch.empty(shape, dtype=self._logits_dtype, **on_meta)
        return stage_class(schedule)(
            module,
            number,
            layout.n_stages,
            self._device,
            input_args=tuple(inputs) if number == 0 else stream,
            output_args=output if number == layout.n_stages - 1 else stream,
            group=self.group,
            take_gradients=self._take_gradients,
        )


def _end(stages: list[BoundedStage]) -> None:
    for stage in stages:
        stage.end_step()


def _takes_several_stages(schedule: str) -> bool:
    return look_up(TAKES_SEVERAL_STAGES, schedule, "parallel.schedule", "the pipeline")
