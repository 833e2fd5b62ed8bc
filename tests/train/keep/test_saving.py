"""Which checkpoints a run writes, keeps and removes when its numbers go wrong."""

import math
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import config, events, fit

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.checkpoint.folders.verification import Verification
from pentameter.errors import InterruptedRunError, TrainingFailedError
from pentameter.parallel.engine import Engine, LossSum
from pentameter.processes.group.world import World
from pentameter.train import boundary
from pentameter.train.keep.saving import RunCheckpoints, advice, first_non_finite
from pentameter.train.state import TrainState

EACH_STEP = {"train": {"eval_interval": None}, "checkpoint": {"interval": 1}}


def saved_steps(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())


def is_finite(run, step):
    checkpoint = open_checkpoint(run / "checkpoints" / f"step-{step:08d}")
    return all(
        torch.isfinite(tensor).all()
        for group in ("model", "optimizer")
        for tensor in checkpoint.tensors(group).values()
    )


@pytest.fixture
def nan_losses(monkeypatch):
    """Steps (0-based) whose loss and gradients are NaN."""
    steps = set()
    real = Engine.forward_backward

    def forward_backward(self, batch, step, **options):
        loss = real(self, batch, step, **options)
        if step not in steps:
            return loss
        for parameter in self.parameters():
            parameter.grad.fill_(math.nan)
        return LossSum(math.nan, loss.n_targets)

    monkeypatch.setattr(Engine, "forward_backward", forward_backward)
    return steps


class At:
    """Does something to the trainer after a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step(self, trainer, metrics):
        if metrics.step == self.step:
            self.act(trainer)


def test_a_run_that_diverges_saves_nothing_after_its_first_skipped_update(tmp_path):
    run = tmp_path / "run"
    sections = {
        **EACH_STEP,
        "optimizer": {"name": "sgd", "learning_rate": 30.0, "clip_norm": 0.0},
        "schedule": {"name": "constant"},
        "train": {"eval_interval": None, "steps": 100},
    }
    with pytest.raises(TrainingFailedError, match=r"lower optimizer\.learning_rate"):
        fit(run, sections=sections)
    first_skip = events(run, "skip")[0]["step"]
    steps = saved_steps(run)
    assert steps == [first_skip - 2]  # from the weights of the next nothing finite came
    assert [e["step"] for e in events(run, "checkpoint")] == list(range(1, first_skip))
    assert all(is_finite(run, step) for step in steps)
    last = events(run)[-1]["reason"]
    assert f"the last checkpoint is step {first_skip - 2}, where the same command" in last


@pytest.mark.parametrize("keep_last", [1, 2])
def test_weights_whose_loss_is_not_finite_push_out_no_good_checkpoint(tmp_path, keep_last):
    """Huge but finite weights, by an accident; the same command then goes on and ends well."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    sections = {**EACH_STEP, "checkpoint": {"interval": 1, "keep_last": keep_last}}

    def spoil(trainer):
        with torch.no_grad():
            next(iter(trainer.engine.parameters())).fill_(3e38)

    with pytest.raises(TrainingFailedError, match=r"step 5 is removed.*last checkpoint is step 4"):
        fit(run, sections=sections, hooks=[At(5, spoil)])
    assert saved_steps(run) == [4] if keep_last == 1 else [3, 4]
    fit(run, sections=sections)
    fit(whole, sections=sections)
    assert [e["loss"] for e in events(run, "train")] == [e["loss"] for e in events(whole, "train")]
    assert saved_steps(run)[-1] == 12


@pytest.mark.parametrize("what", ["model tensor", "optimizer tensor"])
def test_a_nan_is_not_saved_and_the_tensor_is_named(tmp_path, what):
    run, whole = tmp_path / "run", tmp_path / "whole"

    def spoil(trainer):
        parameter = trainer.engine.model.blocks["0"].mlp_norm.weight
        if what == "optimizer tensor":
            parameter = trainer.optimizer.state[parameter]["exp_avg"]
        with torch.no_grad():
            parameter.view(-1)[3] = math.nan

    sections = {"train": {"eval_interval": None}, "checkpoint": {"interval": 4}}
    with pytest.raises(TrainingFailedError, match=f"step 8 is not saved: {what} blocks.0.*norm"):
        fit(run, sections=sections, hooks=[At(8, spoil)])
    assert saved_steps(run) == [4]
    assert is_finite(run, 4)
    for folder in (run, whole):
        fit(folder, sections=sections)
    assert [e["loss"] for e in events(run, "train")] == [e["loss"] for e in events(whole, "train")]


def test_no_interval_saves_while_updates_are_skipped(tmp_path, nan_losses):
    nan_losses.update({3, 4})  # steps 4 and 5
    run = tmp_path / "run"
    trainer, _ = fit(
        run, sections={"train": {"eval_interval": None}, "checkpoint": {"interval": 4}}
    )
    assert [e["step"] for e in events(run, "checkpoint")] == [6, 8, 12]  # 4 is made up for at 6
    assert trainer.state.consecutive_skips == 0


def test_the_end_of_a_run_is_saved_after_a_skipped_update_too(tmp_path, nan_losses):
    nan_losses.add(11)
    run = tmp_path / "run"
    sections = {"train": {"eval_interval": None}, "checkpoint": {"interval": 5, "keep_last": 1}}
    _, end = fit(run, sections=sections)
    assert end.reason == "completed"
    assert saved_steps(run) == [10, 12]  # what step 12 is worth is not proved
    before = events(run, "train")
    fit(run, sections=sections)
    assert events(run, "train") == before


def test_a_signal_while_updates_are_skipped_leaves_the_last_checkpoint(tmp_path, nan_losses):
    nan_losses.update({5, 6})
    run, whole = tmp_path / "run", tmp_path / "whole"

    class Signal:
        def on_skip(self, trainer, skip):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(InterruptedRunError, match=r"skipped; the last checkpoint is step 5") as got:
        fit(run, sections=EACH_STEP, hooks=[Signal()])
    assert got.value.exit_code == 75
    assert saved_steps(run) == [4, 5]
    for folder in (run, whole):
        fit(folder, sections=EACH_STEP)
    for kind in ("train", "skip"):
        assert [(e["step"], e.get("loss")) for e in events(run, kind)] == [
            (e["step"], e.get("loss")) for e in events(whole, kind)
        ]


def test_an_evaluated_checkpoint_stays_proved_when_the_run_goes_on(tmp_path, nan_losses):
    run = tmp_path / "run"
    fit(run, hooks=[At(8, lambda trainer: trainer.stop("for a while"))])
    assert saved_steps(run) == [4, 8]
    nan_losses.update(range(8, 12))
    with pytest.raises(TrainingFailedError, match="the last checkpoint is step 8"):
        fit(run)
    assert saved_steps(run) == [4, 8]


def test_without_a_checkpoint_no_step_0_is_named(tmp_path, nan_losses):
    nan_losses.update(range(100))
    with pytest.raises(TrainingFailedError, match="there is no checkpoint") as caught:
        fit(tmp_path / "run")
    assert "step 0" not in str(caught.value)


def test_fp16_saves_while_its_loss_scale_falls(tmp_path, nan_losses):
    nan_losses.update(range(2, 7))
    run = tmp_path / "run"
    sections = {**EACH_STEP, "train": {"precision": "fp16", "eval_interval": None}}
    trainer, _ = fit(run, sections=sections)
    assert [e["step"] for e in events(run, "checkpoint")] == list(range(1, 13))
    assert trainer.state.proved_step == 11
    assert trainer.state.loss_scale.scale == 2.0**11


@pytest.mark.parametrize(
    ("step", "advice"),
    [(0, "No update has been made, so the learning rate is not the reason: look at the initial "
         "weights (model.init_std=0.02) and at the data; `pentameter report"),
     (4, "lower optimizer.learning_rate=0.01 or look at the data; `pentameter report")],
)  # fmt: skip
def test_the_learning_rate_is_blamed_only_after_an_update(tmp_path, monkeypatch, step, advice):
    real = boundary.evaluate_all

    def broken(run, should_stop):
        found = real(run, should_stop)
        return {"val": replace(found["val"], loss=math.nan)} if run.state.step == step else found

    monkeypatch.setattr(boundary, "evaluate_all", broken)
    with pytest.raises(TrainingFailedError) as failed:
        fit(tmp_path / "run")
    assert f"the validation loss is nan at step {step}" in str(failed.value)
    assert advice in str(failed.value)
    assert ("learning_rate=" in str(failed.value)) == (step > 0)


def test_a_lower_precision_is_a_reason_too(tmp_path):
    weights = SimpleNamespace(path=Path("a/model"))
    run = SimpleNamespace(
        state=TrainState(step=4, consecutive_skips=4),
        folder=SimpleNamespace(initial_weights=weights),
        compute=SimpleNamespace(precision="bf16"),
    )
    assert advice(run).endswith(
        "look at the weights of a/model and at the data, or try train.precision=fp32, not bf16"
    )


def test_what_a_kill_before_pruning_left_is_removed_at_the_next_start(tmp_path, monkeypatch):
    from pentameter.checkpoint.folders.store import CheckpointStore

    run = tmp_path / "run"
    monkeypatch.setattr(CheckpointStore, "prune", lambda *arguments: [])
    fit(run)
    monkeypatch.undo()
    assert saved_steps(run) == [4, 8, 12]
    (run / "checkpoints" / f"step-00000004.tmp-{'0' * 32}").symlink_to("nowhere")
    trainer, _ = fit(run)
    assert saved_steps(run) == [8, 12]
    assert trainer.state.best_step in (8, 12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_element_that_is_not_finite_is_found(value, dtype):
    good = torch.arange(12, dtype=dtype).reshape(3, 4)
    bad = good.clone()
    bad[1, 2] = value
    whole = {"model": {"a": good, "empty": good[:0], "n": torch.tensor(3)}}
    assert first_non_finite(whole, World()) is None
    found = first_non_finite({**whole, "optimizer": {"b": good, "c": bad}}, World())
    assert found == "optimizer tensor c"


def test_a_process_whose_part_is_finite_hears_of_the_other():
    class Two(World):
        def all_reduce_max(self, value):
            return 1

        def all_gather(self, value):
            return [value, "model tensor w on rank 1"]

    here = {"model": {"w": torch.ones(3)}}
    assert first_non_finite(here, Two(0, 2)) == "model tensor w on rank 1"


def test_a_best_that_was_not_saved_does_not_give_up_the_best_before_it():
    pruned = []
    state = TrainState(step=30, best_step=20, saved_best_step=10, proved_step=29)
    store = SimpleNamespace(
        prune=lambda *kept: pruned.append(kept[:2]), verification=Verification()
    )
    run = SimpleNamespace(
        config=config(),
        state=state,
        world=World(),
        folder=SimpleNamespace(store=store, holds_checkpoint=True),
        copies=SimpleNamespace(steps_in_use={25}),
    )
    RunCheckpoints(run, dict).old.prune()
    assert pruned == [(2, [20, 10, 25, 29])]
