"""Trials of the battery: a run is resumed, in its own layout and in another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pentameter.checkpoint.folders.opening import list_checkpoints, open_checkpoint
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.train.keep.saving import tensors_to_save
from trials.faults.oracle import curve, final_tensors, tiny_config
from trials.faults.trial import TIMEOUT_SECONDS, Trial, Undisturbed, join, said

LAYOUTS = {
    "one process": (1, {}),
    "data": (2, {"parallel.data": 2}),
    "zero 1": (2, {"parallel.data": 2, "parallel.zero": 1}),
    "tensor": (2, {"parallel.tensor": 2}),
    "pipeline": (2, {"parallel.pipeline": 2}),
    "zero 3": (2, {"parallel.data": 2, "parallel.zero": 3}),
    "data and tensor": (4, {"parallel.data": 2, "parallel.tensor": 2}),
    "data and pipeline": (
        4,
        {"parallel.data": 2, "parallel.pipeline": 2, "train.micro_batch_size": 2},
    ),
    "zero 2": (2, {"parallel.data": 2, "parallel.zero": 2}),
    "context": (2, {"parallel.context": 2}),
    "tensor with sequence": (2, {"parallel.tensor": 2, "parallel.sequence": True}),
    "tensor and pipeline": (4, {"parallel.tensor": 2, "parallel.pipeline": 2}),
}
"""Name → processes and overrides; the first eight are resumed in each other."""
CHANGED = 8
TOLERANCE = 1e-5
"""Between losses of two layouts, relative: fp32 sums in another order."""


@dataclass(frozen=True)
class StopAt:
    """A hook that stops the run after a step."""

    step: int

    def on_step(self, run, metrics) -> None:
        if metrics.step == self.step:
            run.stop("enough")


@dataclass(frozen=True)
class SaveAgain:
    """A hook that saves what a resumed run has loaded, before it trains."""

    folder: Path

    def on_start(self, run) -> None:
        store = CheckpointStore(self.folder, run_id="again", config_hash="c")
        layout = run.plan.layout.degrees()
        tensors = tensors_to_save(run.engine, run.optimizer)
        store.save(Contents(run.state.step, tensors, {}, {}, layout), run.world, run.engine.meshes)


def in_the_same_layout(trial: Trial) -> str:
    """Stopped after any step and resumed: bit for bit the run that was not."""
    name = list(LAYOUTS)[trial.number % len(LAYOUTS)]
    n_ranks, settings = LAYOUTS[name]
    whole = trial.undisturbed(n_ranks, **settings)
    step = trial.draw.randint(1, 39)
    _stop_at(trial, whole, n_ranks, step)
    trial.finish(whole, n_ranks)
    return f"{name}, stopped after step {step}"


def _stop_at(trial: Trial, whole: Undisturbed, n_ranks: int, step: int) -> None:
    codes = join(trial.start(whole.config, n_ranks, hooks=[StopAt(step)]))
    assert codes == [0] * n_ranks, said(trial.run)
    newest, *_ = list_checkpoints(trial.run / "checkpoints")
    assert newest.step == step


def in_another_layout(trial: Trial) -> str:
    """Stopped after any step and resumed in another layout: the state that it loads is, gathered,
    the one that was saved; its losses are those of the run in one layout but for rounding."""
    names = list(LAYOUTS)[:CHANGED]
    layouts = [(one, other) for one in names for other in names if one != other]
    one, other = layouts[trial.number % len(layouts)]
    n_before, before = LAYOUTS[one]
    n_after, after = LAYOUTS[other]
    whole = trial.undisturbed(n_before, **before)
    step = trial.draw.randint(5, 30)
    _stop_at(trial, whole, n_before, step)
    saved = trial.run / "checkpoints" / f"step-{step:08d}"
    stored = final_tensors(trial.run, step)
    config = tiny_config(trial.folder, **{**after, "parallel.timeout_seconds": TIMEOUT_SECONDS})
    again = SaveAgain(trial.folder / "again")
    codes = join(trial.start(config, n_after, hooks=[again]))
    assert codes == [0] * n_after, said(trial.run)
    loaded = open_checkpoint(again.folder / saved.name)
    for group in ("model", "optimizer"):
        for key, tensor in loaded.tensors(group).items():
            assert torch.equal(tensor[...], stored[f"{group}/{key}"]), f"{group} {key}"
    ours, theirs = curve(trial.run), curve(whole.run)
    assert [each[0] for each in ours] == [each[0] for each in theirs]
    n_steps = step + 10
    for number in (1, 2):  # loss and gradient norm
        pairs = [(a[number], b[number]) for a, b in zip(ours, theirs, strict=True)][:n_steps]
        most = max(abs(a - b) / abs(b) for a, b in pairs)
        assert most < TOLERANCE, f"they differ by {most:.1g}"
    return f"{one} → {other} after step {step}"
