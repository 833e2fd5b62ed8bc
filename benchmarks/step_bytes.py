"""The bytes that a fused step on a CPU moves, by operation, beside the least that they could be.

    python benchmarks/step_bytes.py [--preset shakespeare-char] [--rows 64] [--micro-batch 64]
                                    [--set KEY=VALUE …] [--amx] [--detail]

Counted from shapes, so that no other program and no machine spoils the figure: a step runs, and
each call of a kernel, a matmul or another operation of PyTorch counts what it is given and what it
makes, once each. What a cache keeps from one call to the next is counted all the same.

An operation of the step (a `torch.autograd.Function`) could do with what it is given, makes and
saves, once each: that is its least. So a ratio above 1 is what an operation writes and reads again
within itself. Outside of these operations each call's own bytes are its least. Of a whole step that
keeps as much for the backward pass the least is lower still: what it keeps, written and read once,
and the parameters' part (weights read in both passes, gradients written, and what the norm of the
gradient, clipping and the optimizer move).

`--amx` counts the kernels for AMX on any machine, without running them: the numbers of such a step
mean nothing. `--detail` shows each call.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_sides import random_batches
from pentameter.config.files.load import load_config
from pentameter.fused_cpu import native
from pentameter.fused_cpu.captured.passes import CapturedPasses
from pentameter.machine.capabilities import machine_capabilities
from pentameter.model.compiled import Kernel, plainly
from pentameter.optim.build import build_optimizer
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import Plan, make_plan
from pentameter.train.update import update_weights

SUMS, CLIP, OPTIMIZER = "sums of gradients, loss and the rest", "norm and clipping", "optimizer"


def tensors(*trees: Any) -> list[Tensor]:
    """The tensors in nested tuples and lists, and in the C++ kernels' structs, each memory once."""
    found = {}
    for tree in trees:
        match tree:
            case Tensor():
                found[tree.data_ptr(), tree.nbytes] = tree
            case tuple() | list():
                found |= {(x.data_ptr(), x.nbytes): x for x in tensors(*tree)}
            case native.Struct():
                found |= {(x.data_ptr(), x.nbytes): x for x in tensors(tree.held)}
    return list(found.values())


def size(*trees: Any) -> int:
    """The bytes of `tensors`."""
    return sum(each.nbytes for each in tensors(*trees))


class Count(TorchDispatchMode):
    """Counts what runs inside, as a context manager: `moved`, the bytes of calls by (operation,
    call); `least`, by operation; and `kept`, the bytes saved for the backward pass, by address."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[tuple[str, str]] = Counter()
        self.least: Counter[str] = Counter()
        self.kept: dict[int, int] = {}
        self._operation: str | None = None
        self._in_kernel = False

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Calls inside belong to the operation of this name."""
        before, self._operation = self._operation, name
        try:
            yield
        finally:
            self._operation = before

    def run(self, name: str, kernel: Callable[..., Any], *arguments: Any) -> Any:
        """Run a kernel, and count it as one call."""
        before, self._in_kernel = self._in_kernel, True
        result = kernel(*arguments)
        self._in_kernel = before
        self.add(name, arguments, result)
        return result

    def add(self, name: str, *trees: Any) -> None:
        """Count a call whose operands and results are the trees' tensors."""
        if self._in_kernel:
            return
        self.moved[self._operation or SUMS, name] += size(*trees)
        if self._operation in (None, CLIP, OPTIMIZER):
            self.least[self._operation or SUMS] += size(*trees)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = str(function).removesuffix(".default")
        given = (*args, *(kwargs or {}).values())
        if any(word in name for word in (".new_", "_like", "index_fill")):
            given, result = (
                (),
                () if "fill" in name else result,
            )  # it reads nothing, or hardly writes
        if "empty" not in name and not is_view(function, args, result):
            self.add(name, given, result)
        return result


def is_view(function: Any, args: Any, result: Any) -> bool:
    """Whether an operation returns only memory that it was given, and writes nothing."""
    given = {each.untyped_storage().data_ptr() for each in tensors(args)}
    writes = any(x.alias_info and x.alias_info.is_write for x in function._schema.arguments)
    returns = (each.untyped_storage().data_ptr() in given for each in tensors(result))
    return not writes and all(returns)


def fused_functions() -> set[type[Function]]:
    """The fused step's autograd functions."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith(("pentameter.fused_cpu", "pentameter.model.loss"))
    ]
    values = (value for module in modules for value in vars(module).values())
    return {x for x in values if isinstance(x, type) and issubclass(x, Function)} - {Function}


@contextmanager
def counting(amx: bool) -> Iterator[Count]:
    """Count what runs inside."""
    count = Count()
    call, run, init = native.call, Kernel.__call__, native.Struct.__init__

    def counted_call(library: native.Name, kernel: str, *arguments: Any) -> int:
        count.add(kernel, arguments)
        return 0 if library == "AMX" and amx else call(library, kernel, *arguments)

    def counted_kernel(self: Kernel, *arguments: Any) -> Any:
        return count.run(self.__wrapped__.__name__, run, self, *arguments)  # type: ignore[attr-defined]

    def holding(self: native.Struct, *values: Any) -> None:
        self.held = values
        init(self, *values)

    def counted(name: str, function: Callable[..., Any]) -> Any:
        def inner(ctx: Any, *arguments: Any) -> Any:
            with count.operation(name):
                result = function(ctx, *arguments)
            is_forward = name.endswith("forward")
            saved = (ctx.to_save or ()) if is_forward else ctx.saved_tensors
            count.least[name] += size(arguments, result, saved)
            if is_forward:
                count.kept |= {x.data_ptr(): x.nbytes for x in tensors(saved)}
            return result

        return staticmethod(inner)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Kernel, "__call__", counted_kernel))
        stack.enter_context(patch.object(native.Struct, "__init__", holding))
        for name, module in list(sys.modules.items()):
            if name.startswith("pentameter.fused_cpu") and getattr(module, "call", None) is call:
                stack.enter_context(patch.object(module, "call", counted_call))
        for each in fused_functions():
            for part in ("forward", "backward"):
                inner = counted(f"{each.__name__}, {part}", getattr(each, part))
                stack.enter_context(patch.object(each, part, inner))
        if amx:
            stack.enter_context(patch.dict(native._loaded, AMX=object()))
        # Replayed operations would not say whose they are.
        anew = patch.object(CapturedPasses, "__call__", lambda step, *batch: step._function(*batch))
        stack.enter_context(anew)
        stack.enter_context(count)
        yield count


def count_step(plan: Plan, amx: bool) -> tuple[Count, int]:
    """The count of the second step of a plan, in bf16, and the bytes of its parameters."""
    obstacle = native.load("vector", machine_capabilities())
    if obstacle is not None:
        sys.exit(f"other kernels than a run's would be counted: {obstacle}")
    engine = assemble(plan, torch.device("cpu"), "bf16", compiled=True)
    config = plan.config.optimizer
    optimizer = build_optimizer(engine.named_parameters(), plan.table, config)
    batches = random_batches(plan)
    with (
        plainly()
    ):  # PyTorch compiles nothing within a dispatch mode, and what it would is the same
        loss = engine.forward_backward(batches.batch(0, engine.rows), 0)
    update_weights(engine, optimizer, loss, config.learning_rate, 1.0, config.clip_norm)
    with plainly(), counting(amx) as count:
        engine.forward_backward(batches.batch(1, engine.rows), 1)
        with count.operation(CLIP):
            engine.clip_gradients(engine.gradient_norm(), config.clip_norm)
        with count.operation(OPTIMIZER):
            optimizer.step()
    return count, size(list(engine.parameters()))


def show(count: Count, parameter_bytes: int, detail: bool) -> None:
    """Print the table."""
    moved: Counter[str] = Counter()
    for (operation, _), n_bytes in count.moved.items():
        moved[operation] += n_bytes
    rows = [(name, n_bytes, count.least[name]) for name, n_bytes in moved.most_common()]
    rows.append(("sum", sum(moved.values()), sum(count.least.values())))
    for name, n_bytes, least in rows:
        ratio = n_bytes / max(1, least)
        print(f"{name:<38} {n_bytes / 1e6:9.1f} MB  least {least / 1e6:9.1f}  {ratio:5.2f} ×")
        for (operation, call), part in count.moved.most_common() if detail else ():
            if operation == name and part >= 50_000:
                print(f"    {call:<48} {part / 1e6:9.1f}")
    kept = sum(count.kept.values())
    floor = 2 * kept + 3 * parameter_bytes + moved[CLIP] + moved[OPTIMIZER]
    print(
        f"kept for the backward pass {kept / 1e6:.1f} MB, parameters {parameter_bytes / 1e6:.1f}: "
        f"no step that keeps as much moves less than {floor / 1e6:.1f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="shakespeare-char")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--amx", action="store_true")
    parser.add_argument("--detail", action="store_true")
    asked = parser.parse_args()
    given: dict[str, Any] = {
        "model.vocab_size": 65,
        "train.device": "cpu",
    }
    given |= {} if asked.rows is None else {"train.batch_size": asked.rows}
    given |= {} if asked.micro_batch is None else {"train.micro_batch_size": asked.micro_batch}
    given |= dict(pair.split("=", 1) for pair in asked.set)
    show(*count_step(make_plan(load_config(asked.preset, given)), asked.amx), asked.detail)


if __name__ == "__main__":
    main()
