"""Optimizers as users write them, and what processes do with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from asynchronous_worlds import patient
from tiny_runs import config

from pentameter.errors import PentameterError
from pentameter.processes.group.world import World
from pentameter.train.loop import Trainer


class ByHand(torch.optim.Optimizer):
    """Adam with a momentum in bf16, Python numbers, a number in its groups (as Prodigy's d), one in
    an attribute, and a draw for each update."""

    def __init__(self, groups):
        super().__init__(groups, {"betas": (0.9, 0.99), "d": 1e-3, "lr": 1e-2})
        self.n_updates = 0
        self.history = []

    def step(self, closure=None):
        self.n_updates += 1
        self.history = [*self.history[-2:], (self.n_updates, float("inf"))]
        for group in self.param_groups:
            group["d"] *= 1.5
            group["drawn"] = torch.rand(()).item()
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["n"] = 0
                    state["fast"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["square"] = torch.zeros_like(parameter)
                    state["none"] = None
                state["n"] += 1
                grad = parameter.grad.detach()
                state["fast"].mul_(0.9).add_(grad.to(torch.bfloat16), alpha=0.1)
                state["square"].mul_(0.99).addcmul_(grad, grad, value=0.01)
                scale = -group["lr"] * (1 + group["d"]) * (1 + group["drawn"] / 10)
                update = state["fast"].float() / (state["square"].sqrt() + 1e-8)
                parameter.data.add_(update, alpha=scale / (1 + self.n_updates / state["n"]))


class Matrices(torch.optim.Optimizer):
    """One that keeps a list of matrices for each parameter, as SOAP and Shampoo do, and in its
    group a tensor and a generator."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-2})

    def step(self, closure=None):
        for group in self.param_groups:
            generator = group.setdefault("noise", torch.Generator().manual_seed(3))
            group["total"] = group.get("total", torch.zeros(1)) + 1
            for parameter in group["params"]:
                grad = parameter.grad.detach()
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                kept = self.state[parameter].setdefault(
                    "GG", [torch.eye(n) if n < 32 else [] for n in grad.shape]
                )
                for axis, each in enumerate(kept):
                    if isinstance(each, torch.Tensor):
                        other = [n for n in range(grad.ndim) if n != axis]
                        each.lerp_(torch.tensordot(grad, grad, (other, other)), 0.1)
                size = 1 + sum(float(each.norm()) for each in kept if len(each))
                noise = torch.randn((), generator=generator).item()
                parameter.data.add_(parameter.grad, alpha=-group["lr"] * (1 + noise / 9) / size)


class Eighth(torch.Tensor):
    """Numbers in eight bits with a scale, as quantized optimizers keep them."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], [torch.float32, True]

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size=None, outer_stride=None):
        assert context == [torch.float32, True]
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.detach.default
        return cls(args[0].codes, args[0].scale)

    def set(self, value):
        self.scale.copy_(value.abs().amax() / 127)
        self.codes.copy_((value / self.scale.clamp(min=1e-12)).round().to(torch.int8))

    def get(self):
        return self.codes.float() * self.scale


class Quantized(torch.optim.Optimizer):
    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-2})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if "momentum" not in self.state[p]:
                    codes = torch.zeros_like(p, dtype=torch.int8)
                    self.state[p]["momentum"] = Eighth(codes, torch.zeros(()))
                momentum = self.state[p]["momentum"]
                momentum.set(momentum.get() * 0.9 + p.grad)
                p.data.add_(momentum.get(), alpha=-group["lr"])


class InLists(torch.optim.Optimizer):
    """One whose buffers are attributes, a step count among them, and that holds another one."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-2})
        self.inner = torch.optim.NAdam(self.param_groups, lr=1e-2)
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.parameters]
        self.helper = lambda: None

    def step(self, closure=None):
        self.inner.step()
        self.count = getattr(self, "count", 0) + 1
        if self.count % 3 == 0:
            for slow, p in zip(self.slow, self.parameters, strict=True):
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)


class Unkeepable(ByHand):
    """One with an object in its parameters' states."""

    def step(self, closure=None):
        super().step()
        for state in self.state.values():
            state["helper"] = self.helper_of_state

    def helper_of_state(self):
        pass


class StopAt:
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, step):
        if step.step == self.step:
            trainer.stop("here")


def fit(run_dir: Path, optimizer: Any, *, world: World | None = None, stop=None, **sections: Any):
    sections["model"] = {"n_layers": 2, **sections.get("model", {})}
    sections["train"] = {"eval_interval": None, "sample_interval": None, "steps": 8}
    sections["checkpoint"] = {"keep_last": 9}
    trainer = Trainer(
        config(**sections),
        run_dir=run_dir,
        quiet=True,
        optimizer=optimizer,
        world=world,
        hooks=[] if stop is None else [StopAt(stop)],
    )
    trainer.fit()
    return trainer.run


def whole_and_stopped(world: World, folder: Path, optimizer: Any, sections: dict[str, Any]) -> str:
    """Train twice, once with a stop between; "" or why that is refused."""
    world = patient(world)
    try:
        fit(folder / "whole", optimizer, world=world, **sections)
        fit(folder / "run", optimizer, world=world, **sections, stop=5)
        fit(folder / "run", optimizer, world=world, **sections)
    except PentameterError as error:
        return str(error)
    return ""


def go_on(world: World, folder: Path, optimizer: Any, sections: dict[str, Any]) -> str:
    """Go on with a run in another layout, to its end; "" or why that is refused."""
    try:
        fit(folder, optimizer, world=patient(world), **sections)
    except PentameterError as error:
        return str(error)
    return ""
