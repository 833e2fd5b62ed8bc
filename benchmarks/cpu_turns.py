"""The sides of `train_cpu.py`, and a turn of one of them: alone, and timed once it has settled.

A step is slow at first: code is compiled, heaps grow, pages are faulted in. On two cores a plain
step needs about ten of them. So a turn warms up until the time of a step has settled, by the rule
of `settled`, and only then counts. A turn has a process of its own, which is gone before the next
begins, with its memory and its threads.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch

from pentameter.data.batches.step import training_batches
from pentameter.data.open_dataset import open_dataset
from pentameter.machine.capabilities import machine_capabilities
from pentameter.machine.choices import choose_precision
from pentameter.machine.load.other_programs import OtherPrograms
from pentameter.machine.peaks import measure_matmul
from pentameter.optim.build import build_optimizer, set_learning_rate
from pentameter.optim.schedule import learning_rate
from pentameter.parallel.assemble import assemble
from pentameter.parallel.precision import arithmetic
from pentameter.planning.plan import Plan
from pentameter.train.compute import choose_compute
from plain_gpt import PlainGPT, make_optimizer, train_step

LEAST_STEPS = 12
MOST_STEPS = 40
WINDOW = 4  # steps that are compared with one another, and with as many before them
SPREAD = 0.05
TREND = 0.02

SETTLED = (
    f"at least {LEAST_STEPS} steps, the last {WINDOW} within {100 * SPREAD:.0f} % of one another "
    f"and their median at most {100 * TREND:.0f} % below that of the {WINDOW} before; "
    f"at most {MOST_STEPS}"
)
"""The rule of `settled`, for people."""

Step = Callable[[int], float]
"""Trains the step of this number and returns its mean loss."""


@dataclass(frozen=True)
class Turn:
    """The steps of one side in one process. `how` says how they were computed, `cpu_seconds` are
    those of all its threads in each of the counted `seconds`, and `other_cores` is how many cores
    other programs kept busy meanwhile."""

    how: str
    losses: list[float]
    warm_up_seconds: list[float]
    seconds: list[float]
    cpu_seconds: list[float]
    settled: bool
    peak_bytes: int
    other_cores: float


def settled(seconds: Sequence[float]) -> bool:
    """Whether the times of steps so far obey the rule SETTLED (but for the most steps)."""
    if len(seconds) < LEAST_STEPS:
        return False
    last, before = seconds[-WINDOW:], seconds[-2 * WINDOW : -WINDOW]
    steady = max(last) <= (1 + SPREAD) * min(last)
    return steady and median(last) >= (1 - TREND) * median(before)


def ours(plan: Plan, checkout: Path | None) -> tuple[str, Step]:
    """The step of this package, as the trainer runs it, and how it is computed."""
    engine = choose_compute(plan)
    stage = assemble(plan, engine.device, engine.precision, compiled=engine.compiled)
    config = plan.config.optimizer
    optimizer = build_optimizer(stage.named_parameters(), plan.table, config)
    batch = _batches(plan)

    def step(number: int) -> float:
        loss = stage.forward_backward(batch(number), number).mean
        stage.clip_gradients(stage.gradient_norm(), config.clip_norm)
        set_learning_rate(optimizer, learning_rate(number, config, plan.config.schedule))
        optimizer.step()
        stage.router_balance.move()
        optimizer.zero_grad(set_to_none=True)
        return loss

    compiled = "compiled" if engine.compiled else "eager"
    return f"{engine.precision}, {compiled}: {engine.compile_reason}", step


def plain(plan: Plan, checkout: Path | None) -> tuple[str, Step]:
    """The same step by `plain_gpt.py`."""
    torch.manual_seed(plan.config.seed)
    config = plan.config.model
    assert config.vocab_size is not None
    model = PlainGPT(
        config.vocab_size,
        config.context_length,
        config.n_layers,
        config.attention.n_heads,
        config.d_model,
        config.dropout,
        config.dropout,  # as nanoGPT: one rate, on attention weights too
    )
    model.train()
    optimizer = make_optimizer(model)
    batch = _tensors(plan)

    def step(number: int) -> float:
        return train_step(model, optimizer, [batch(number)], learning_rate=_rate(plan, number))

    return "fp32, eager", step


def nanogpt(plan: Plan, checkout: Path | None) -> tuple[str, Step]:
    """The same step by the model and the optimizer of a checkout of karpathy/nanoGPT, in the order
    of its train.py."""
    assert checkout is not None
    theirs = load_nanogpt(checkout)
    torch.manual_seed(plan.config.seed)
    config, groups = plan.config.model, plan.config.optimizer
    model = theirs.GPT(
        theirs.GPTConfig(
            block_size=config.context_length,
            vocab_size=config.vocab_size,
            n_layer=config.n_layers,
            n_head=config.attention.n_heads,
            n_embd=config.d_model,
            dropout=config.dropout,
            bias=config.bias,
        )
    )
    model.train()
    optimizer = model.configure_optimizers(
        groups.weight_decay, groups.learning_rate, groups.betas, "cpu"
    )
    batch = _tensors(plan)

    def step(number: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = _rate(plan, number)
        _, loss = model(*batch(number))
        mean = loss.item()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), groups.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(mean)

    return "fp32, eager, as its README runs on a CPU (--compile=False)", step


SIDES = {
    **{"plain": plain, "nanogpt": nanogpt},
    **dict.fromkeys(("ours", "modern", "dense", "mixture"), ours),
}
"""Side → what makes its step."""


def load_nanogpt(checkout: Path) -> ModuleType:
    """The file model.py of a checkout of nanoGPT. Exits where there is none."""
    path = checkout / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    if spec is None or spec.loader is None or not path.is_file():
        sys.exit(f"--nanogpt {checkout}: no model.py there; name a checkout of karpathy/nanoGPT")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its own module up
    spec.loader.exec_module(module)
    return module


def take_turn(side: str, plan: Plan, n_steps: int, checkout: Path | None = None) -> Turn:
    """A turn of a side in a process of its own: warmed up until it has settled, then `n_steps`."""
    return _alone(_turn, side, plan, n_steps, checkout)


def measure_ceiling(plan: Plan) -> tuple[str, float]:
    """The precision that `plan` trains in on this CPU, and the FLOP/s of its products here."""
    return _alone(_ceiling, plan)


def _alone(function: Callable[..., Any], *arguments: object) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(function, *arguments).result()


def _turn(side: str, plan: Plan, n_steps: int, checkout: Path | None) -> Turn:
    with redirect_stdout(sys.stderr):  # nanoGPT prints as it starts
        how, step = SIDES[side](plan, checkout)
    others = OtherPrograms()
    losses, times, cpu_times = list[float](), list[float](), list[float]()

    def timed() -> None:
        start, cpu_start = time.perf_counter(), time.process_time()
        losses.append(step(len(losses)))
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - cpu_start)

    while not settled(times) and len(times) < MOST_STEPS:
        timed()
    n_warm_up = len(times)
    for _ in range(n_steps):
        timed()
    return Turn(
        how,
        losses,
        times[:n_warm_up],
        times[n_warm_up:],
        cpu_times[n_warm_up:],
        settled(times[:n_warm_up]),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        others.cores(lambda own: [own]),
    )


def _ceiling(plan: Plan) -> tuple[str, float]:
    device = torch.device("cpu")
    precision, _ = choose_precision(plan.config.train.precision, device, machine_capabilities())
    return precision, measure_matmul(device, arithmetic(precision).products, 2.0)


def _batches(plan: Plan) -> Callable[[int], Any]:
    """Number → the step's batch of the run itself, so that all sides learn from the same text."""
    split = open_dataset(plan.config.data).split("train")
    return training_batches(plan.config, split).batch


def _tensors(plan: Plan) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    batch = _batches(plan)

    def tensors(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        current = batch(number)
        return torch.from_numpy(current.inputs), torch.from_numpy(current.targets)

    return tensors


def _rate(plan: Plan, number: int) -> float:
    return learning_rate(number, plan.config.optimizer, plan.config.schedule)
