"""The item `graphs` of a GPU day: each step of a small mixture, eager, compiled, and compiled with
CUDA graphs, in bf16 and in fp32, beside fp64. A right form in fp32 is within 1e-4.

A form runs in a process of its own, all side by side: `python gpu_day_graphs.py FORM DEVICE` prints
a JSON line for each of its runs. In `led`, every step begins with fp64's weights, so that a wrong
step spoils none that follow, and each gradient is compared: the worst three as (name, distance from
the right one, its part along the right one: 0.5 for half of it, 2 for twice), relative. `free` is
the same run as in `mixtures`, with its own weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_day_cases import MIXTURE, MIXTURE_ROWS, plan_of
from pentameter.data.batches.step import Batch
from pentameter.model import experts
from pentameter.model.gpu.forms import GpuForms
from pentameter.parallel.assemble import assemble
from pentameter.parallel.engine import Engine
from pentameter.parallel.stage_module import StageModule
from pentameter.planning.plan import Plan

FORMS = [  # (precision, how, what differs)
    ("bf16", "eager", ""),
    ("fp32", "eager", ""),
    ("bf16", "graphs", ""),
    ("fp32", "graphs", ""),
    ("bf16", "compiled", ""),
    ("fp32", "compiled", ""),
    ("fp32", "compiled", "in place"),  # wrong with torch 2.11, right with 2.13
    ("bf16", "graphs", "dense"),
]
N = 6
Gradients = dict[str, Tensor]


def of_graphs(tell: Callable[..., None], device: torch.device, folder: Path) -> None:
    """Tell each form's losses, norms and worst gradients."""
    began = time.perf_counter()

    def tell_all(form: tuple[str, str, str]) -> None:
        caches = folder / "caches" / "-".join(form)
        places = {name: str(caches) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(form), str(device)],
            env={**os.environ, **places, "TORCHINDUCTOR_COMPILE_THREADS": "4"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                row = {**json.loads(line), "at": round(time.perf_counter() - began, 1)}
                tell(graphs=form, **row)

    forms = FORMS if device.type == "cuda" else FORMS[:1]
    threads = [threading.Thread(target=tell_all, args=(form,)) for form in forms]
    for each in threads:
        each.start()
    tell(graphs="fp64 of the CPU", steps=right_steps(mixture_plan(""), torch.device("cpu"))[0])
    for each in threads:
        each.join()


def mixture_plan(differs: str) -> Plan:
    """Plan the small mixture of `mixtures`, or a model without experts if `dense`."""
    without = ("experts", "router") if differs == "dense" else ()
    model = {key: value for key, value in MIXTURE.items() if key not in without}
    return plan_of({"model": model, "train": MIXTURE_ROWS})


def step_of(engine: Engine, step: int) -> tuple[float, float, Gradients]:
    """Return a step's loss, norm and gradients."""
    tokens = np.random.default_rng(0).integers(0, 102, (16, 129))
    engine.zero_gradients()
    batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), engine.rows)
    loss, norm = engine.forward_backward(batch, step), engine.gradient_norm()
    named = engine.named_parameters()
    found = {name: each.grad.double() for name, each in named if each.grad is not None}
    return float(loss.total), float(norm), {name: each.clone() for name, each in found.items()}


@torch.no_grad()
def learn(engine: Engine) -> None:
    """Take a step down each gradient."""
    for _, parameter in engine.named_parameters():
        if parameter.grad is not None:
            parameter.sub_(parameter.grad, alpha=0.1)


def right_steps(
    plan: Plan, device: torch.device
) -> tuple[list[tuple[float, float]], list[Gradients], list[Gradients]]:
    """Return each step's (loss, norm), gradients and weights before it, in fp64, eager."""
    engine = assemble(plan, device, "fp64", compiled=False)
    numbers, gradients, weights = [], [], []
    for step in range(N):
        weights.append({k: each.detach().clone() for k, each in engine.named_parameters()})
        loss, norm, found = step_of(engine, step)
        numbers.append((loss, norm))
        gradients.append(found)
        learn(engine)
    return numbers, gradients, weights


def worst_of(found: Gradients, right: Gradients) -> list[tuple[str, float, float]]:
    """Return the three worst gradients: name, relative distance, part along the right one."""
    rows = []
    for name, other in right.items():
        size = other.square().sum().clamp_min(1e-30)
        off = (found[name] - other).square().sum() / size
        along = (found[name] * other).sum() / size
        rows.append((name, off.sqrt().item(), along.item()))
    return sorted(rows, key=lambda row: -row[1])[:3]


def run(form: tuple[str, str, str], device: torch.device) -> None:
    """Print what one form says."""
    precision, how, differs = form
    plan = mixture_plan(differs)
    numbers, gradients, weights = right_steps(plan, device)
    if differs == "in place":  # as rows were put back before
        experts._restored = lambda rows, order: torch.empty_like(rows).index_copy_(0, order, rows)
    if how == "compiled":  # as a run compiles where it does not replay

        def without_graphs(self: StageModule, plan: Plan, *, replays: bool) -> None:
            self.run_compiled(replays=False)

        StageModule.speed_up = without_graphs  # type: ignore[method-assign]
    engine = assemble(
        plan,
        device,
        precision,
        compiled=how != "eager",
        forms=GpuForms(experts_at_once=precision == "bf16" and device.type == "cuda"),
    )
    begun = {name: each.detach().clone() for name, each in engine.named_parameters()}
    (module,) = engine.stage_modules
    for led in (False, True):
        rows, worst = [], []
        with torch.no_grad():
            for name, parameter in engine.named_parameters():
                parameter.copy_(begun[name])
        for step in range(N):
            if led:
                with torch.no_grad():
                    for name, parameter in engine.named_parameters():
                        parameter.copy_(weights[step][name])
            loss, norm, found = step_of(engine, step)
            rows.append((loss, norm))
            if led or step == 0:
                worst.append(worst_of(found, gradients[step]))
            if not led:
                learn(engine)
        zipped = zip(rows, numbers, strict=True)
        pairs = [pair for x, y in zipped for pair in zip(x, y, strict=True)]
        facts = {"replays": module.replays, "obstacle": module.graph_obstacle}
        off = [abs(a - b) / abs(b) for a, b in pairs]
        say(
            run="led" if led else "free", loss_off=off[::2], norm_off=off[1::2], steps=rows, **facts
        )
        say(worst=worst)


def say(**row: Any) -> None:
    """Print a line."""
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    asked, where = json.loads(sys.argv[1]), torch.device(sys.argv[2])
    try:
        run(asked, where)
    except Exception as error:
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {error}"[:600])
