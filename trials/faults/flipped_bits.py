"""Trials of silent corruption: a bit flips in one process of a tiny run, which has to find it.

`trials` makes many at once and returns a `Result` for each; `a_flipped_bit` is a trial of the
battery. `python -m trials.faults.flipped_bits` prints the table in
benchmarks/measurements/faults.md.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.errors import PentameterError
from pentameter.parallel.local_shards import local_shard
from pentameter.processes.group.world import World
from pentameter.train.loop import Trainer
from trials.faults.battery import failure_bound
from trials.faults.trial import Trial
from trials.layout_runs import TINY, Runs, changed

N_STEPS, INTERVAL = 12, 4
CHECKED = changed(
    TINY,
    {
        "train.steps": N_STEPS,
        "train.check_every": INTERVAL,
        "checkpoint.interval": N_STEPS,
        "checkpoint.asynchronous": False,
        "model.dropout": 0.1,
        "optimizer.clip_norm": 0.3,  # it does clip, so the norm counts
    },
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data=2": (2, {"parallel.data": 2}),
    "data=3": (3, {"parallel.data": 3, "train.batch_size": 9}),
    "data=2,zero=1": (2, {"parallel.data": 2, "parallel.zero": 1}),
    "data=2,zero=2": (2, {"parallel.data": 2, "parallel.zero": 2}),
    "data=2,zero=3": (2, {"parallel.data": 2, "parallel.zero": 3}),
    "tensor=2": (2, {"parallel.tensor": 2}),
    "data=2,tensor=2": (4, {"parallel.data": 2, "parallel.tensor": 2}),
}
COLLECTIVES = (
    "all_reduce", "reduce_scatter_tensor", "reduce_scatter_single",
    "all_gather_into_tensor", "all_gather_single",
)  # fmt: skip

Outcome = Literal["found", "no effect", "missed"]


@dataclass(frozen=True)
class Result:
    """What became of one flipped bit. `found`: the run ended with exit code 70 within `INTERVAL`
    steps, and nothing was saved since, or all ranks left the update out, as loss or norm were not
    finite. `no effect`: all that the run saved at its end is what an
    undisturbed one saves, as a later sum rounded the bit away. Else it is `missed`."""

    fault: str
    layout: str
    seed: int
    outcome: Outcome
    said: str
    names_rank: bool
    """Whether the faulty rank is the only one that the message accuses."""
    distance: float
    """Of the weights at the end from those of an undisturbed run, ÷ their norm; NaN if the run did
    not get there."""


class Flip:
    """A hook that lets one bit flip, in the process and at the step that the seed draws."""

    def __init__(self, fault: str, layout: str, seed: int, world: World) -> None:
        self.drawn = random.Random(f"{fault} {layout} {seed}")
        self.fault, self.step = fault, self.drawn.randrange(2, N_STEPS)
        self.rank = self.drawn.randrange(world.size)
        self.is_faulty = world.rank == self.rank
        self.has_flipped, self.n_sent = False, 0
        self.chosen: int | None = None
        """Messages to let pass before the one that is changed."""
        self.stack = ExitStack()

    def on_start(self, run: Any) -> None:
        """Put the fault in the way of the step."""
        forward_backward = run.engine.forward_backward
        if self.fault == "processor" and self.is_faulty:
            layer = next(m for name, m in run.engine.models[0].named_modules() if "mlp.up" in name)
            layer.register_forward_hook(self._wrong_product)
        if self.fault == "message":
            for name in COLLECTIVES:
                real = getattr(dist, name, None)
                if real is not None:
                    self.stack.enter_context(
                        mock.patch.object(dist, name, partial(self._sent, real))
                    )

        def noted(batch: Any, index: int, **options: Any) -> Any:
            loss = forward_backward(batch, index, **options)
            if self.fault == "gradient" and index == self.step - 1:
                grads = [each.grad for each in run.engine.parameters() if each.grad is not None]
                self._flip_one(grads)
            return loss

        run.engine.forward_backward = noted
        self.now = run.state

    def on_step(self, run: Any, step: Any) -> None:
        """Flip a bit at rest."""
        if step.step != self.step:
            return
        if self.fault == "weight":
            self._flip_one([each for _, each in run.engine.named_parameters()])
        if self.fault == "moment":
            state = run.optimizer.state.values()
            self._flip_one([x for each in state for x in each.values() if x.ndim])

    def _flip_one(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.has_flipped or not self.is_faulty:
            return
        self.has_flipped = True
        local = [shard for each in tensors if (shard := local_shard(each)[0]).numel()]
        self._flip(self.drawn.choice(local))

    def _flip(self, tensor: torch.Tensor) -> None:
        """Flip a bit of a tensor (any shape, any dtype with 32 or 64 bits)."""
        position = self.drawn.randrange(tensor.numel())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), tensor.shape))
        with torch.no_grad():
            element = tensor.detach()[index].reshape(1).clone()
            whole = torch.int64 if element.dtype == torch.float64 else torch.int32
            bit = self.drawn.randrange(element.element_size() * 8)
            mask = 1 << bit if bit < element.element_size() * 8 - 1 else -(1 << bit)
            tensor.detach()[index] = (element.view(whole) ^ mask).view(element.dtype)[0]

    def _wrong_product(self, layer: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        """From its step on, one output of a layer is wrong in the same bit each time."""
        if self.now.step < self.step - 1:
            return output
        wrong = output.clone()
        row = wrong.detach().reshape(-1)
        bit = 1 << (16 + self.rank)  # the same element and bit each time
        row[:1] = (row[:1].view(torch.int32) ^ bit).view(torch.float32)
        return wrong

    def _sent(self, real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a collective, and flip a bit of what it delivers here, once."""
        done = real(*arguments, **options)
        names = ("tensor", "output", "output_tensor")
        output = arguments[0] if arguments else next(options[n] for n in names if n in options)
        if not output.is_floating_point():
            return done
        if self.now.step == self.step - 2:  # the step before, which sends as many
            self.n_sent += 1
        elif self.now.step == self.step - 1 and self.is_faulty and not self.has_flipped:
            if self.chosen is None:
                self.chosen = self.drawn.randrange(self.n_sent)
            if self.chosen == 0:
                self.has_flipped = True
                if done is not None:
                    done.wait()
                self._flip(output)
            self.chosen -= 1
        return done


def _train(world: World, layout: str, folder: Path, hook: Flip | None) -> str:
    """Train; return the error that ended the run, "" for none."""
    config = changed(CHECKED, LAYOUTS[layout][1])
    hooks = () if hook is None else (hook,)
    try:
        Trainer(config, run_dir=folder, quiet=True, world=world, hooks=hooks).fit()
    except PentameterError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if hook is not None:
            hook.stack.close()
    return ""


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in the last checkpoint."""
    checkpoint = open_checkpoint(folder / "checkpoints" / f"step-{N_STEPS:08d}")
    return {
        f"{group} {name}": tensor[...].clone()
        for group in ("model", "optimizer")
        for name, tensor in checkpoint.tensors(group).items()
    }


def _skip(folder: Path) -> str | None:
    """The reason for which the guard left an update out; None if it left out none."""
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = [each["reason"] for each in events if each["event"] == "skip"]
    return next((f"skipped: {reason}" for reason in found), None)


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Euclidean distance of the weights ÷ the norm of `other`'s."""
    names = [name for name in other if name.startswith("model ")]
    between = sum((one[name] - other[name]).double().square().sum() for name in names)
    return float((between / sum(other[name].double().square().sum() for name in names)) ** 0.5)


def trials_here(
    world: World, layout: str, faults: Sequence[tuple[str, int]], folder: Path
) -> list[Result]:
    """Make the trials of these faults and seeds in this process, one of the world's."""
    _train(world, layout, folder / "undisturbed", None)
    expected = _saved(folder / "undisturbed")
    results = []
    for fault, seed in faults:
        path, flip = folder / f"{fault}-{seed}", Flip(fault, layout, seed, world)
        said = _train(world, layout, path, flip)
        world.barrier()
        checkpoints = list((path / "checkpoints").glob("step-*"))
        outcome: Outcome = "missed"
        last = flip.now.step  # of the state that the run ended with
        n_pairs = -(-LAYOUTS[layout][1].get("parallel.data", 1) // 2)  # which take turns
        within = INTERVAL * (n_pairs if fault == "processor" else 1)
        if said.startswith("TrainingFailedError") and last - flip.step <= within:
            outcome = "missed" if checkpoints else "found"
        distance = math.nan
        if not said:
            saved = _saved(path)
            distance = _distance(saved, expected)
            if (reason := _skip(path)) is not None:
                outcome, said = "found", reason
            elif all(torch.equal(saved[name], expected[name]) for name in expected):
                outcome = "no effect"
        others = {f"rank {rank}" for rank in range(world.size)} - {f"rank {flip.rank}"}
        accused = said.split(" is not that of")[0].split("they differ on")[0]
        names = f"rank {flip.rank}" in accused and not any(other in accused for other in others)
        names = names and "either may be wrong" not in said
        results.append(Result(fault, layout, seed, outcome, said, names, distance))
        world.barrier()
        if world.is_main:
            shutil.rmtree(path)
    return results


def trials(runs: Runs, layout: str, faults: Sequence[tuple[str, int]]) -> list[Result]:
    """Make the trials of these faults and seeds on a layout, in the processes of `runs`."""
    folder = runs.new_folder()
    found = runs.do(LAYOUTS[layout][0], trials_here, layout, faults, folder)[0]
    shutil.rmtree(folder)
    return found


FAULTS = ("weight", "moment", "gradient", "message", "processor")
BATCH = 25
"""Trials that a set of processes makes before it is replaced."""


def main() -> None:
    """Print outcomes by fault and layout."""
    options = argparse.ArgumentParser()
    options.add_argument("--trials", type=int, default=100)
    options.add_argument("--faults", default=",".join(FAULTS))
    options.add_argument("--layouts", default=";".join(LAYOUTS))
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, Runs(Path(folder)) as runs:
        for layout in asked.layouts.split(";"):
            for fault in asked.faults.split(","):
                _print(runs, fault, layout, asked.trials)


def _print(runs: Runs, fault: str, layout: str, n_trials: int) -> None:
    found = []
    for first in range(0, n_trials, BATCH):
        seeds = range(first, min(first + BATCH, n_trials))
        found += trials(runs, layout, [(fault, seed) for seed in seeds])
    counts = {
        name: sum(r.outcome == name for r in found) for name in ("found", "no effect", "missed")
    }
    named = sum(r.names_rank for r in found if r.outcome == "found")
    said = f" (95 % bound {failure_bound(n_trials, counts['missed']):.1%})"
    print(f"{layout:18} {fault:10} {counts}{said}, rank named alone {named}", flush=True)
    for each in found:
        if each.outcome == "missed":
            print(f"    seed {each.seed}: weights off by {each.distance:.1e} {each.said[:300]}")


AT_REST_LAYOUTS = ("data=2", "data=2,zero=1", "data=2,zero=2", "data=2,zero=3", "tensor=2")
"""Layouts of two ranks in which a weight or the optimizer's state that flips is always found."""


def a_flipped_bit(trial: Trial, fault: str, layouts: Sequence[str] = ("data=2",)) -> str:
    """A trial of the battery: the flipped bit is found within INTERVAL steps and not saved, or has
    no effect."""
    layout = layouts[trial.number % len(layouts)]
    with Runs(trial.folder) as runs:
        (found,) = trials(runs, layout, [(fault, trial.draw.randrange(2**32))])
    told = f"{layout}: {found.outcome}; {found.said[:300]}"
    assert found.outcome != "missed", f"{told}; weights off by {found.distance:.1e}"
    return told


if __name__ == "__main__":
    main()
