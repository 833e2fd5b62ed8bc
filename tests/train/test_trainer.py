"""The loop in one process: what a run folder holds, hooks, patience, skips, refusals."""

import errno
import json
import math
import os

import numpy as np
import pytest
import torch
from tiny_runs import config, events, fit

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.config.files.load import load_config
from pentameter.disk.lock import RunLock
from pentameter.errors import ConfigError, StorageError, TrainingFailedError
from pentameter.parallel.engine import Engine, LossSum
from pentameter.processes.group.world import World
from pentameter.train.loop import Trainer


def test_a_run_folder_holds_what_the_interface_promises(tmp_path):
    run = tmp_path / "run"
    sections = {"train": {"sample_interval": 6, "sample_tokens": 5, "sample_prompt": "ab"}}
    _, end = fit(run, sections=sections)
    assert (end.step, end.reason) == (12, "completed")
    for name in ("config.toml", "plan.json", "environment.json", "metrics.jsonl", "log.txt"):
        assert (run / name).stat().st_size > 0, name
    assert load_config(run / "config.toml").model.vocab_size == 16
    first = events(run)[0]
    assert first["event"] == "start"
    train = events(run, "train")
    assert [e["step"] for e in train] == list(range(1, 13))
    keys = "step tokens loss learning_rate grad_norm step_seconds tokens_per_second mfu"
    assert set(train[0]) >= {*keys.split(), "peak_memory_bytes", "eta_seconds"}
    assert train[-1]["tokens"] == 12 * 4 * 16
    assert train[-1]["loss"] < train[0]["loss"]
    assert [e["step"] for e in events(run, "eval")] == [0, 4, 8, 12]
    assert sorted(path.name for path in (run / "samples").iterdir()) == [
        "step-00000000.txt",
        "step-00000006.txt",
        "step-00000012.txt",
    ]
    assert len((run / "samples" / "step-00000012.txt").read_text()) == 7
    assert "step 12/12" in (run / "log.txt").read_text()


def test_the_same_command_after_completion_does_nothing(tmp_path):
    run = tmp_path / "run"
    fit(run)
    before = events(run, "train")
    _, end = fit(run)
    assert end.reason == "completed"
    assert events(run, "train") == before


def test_more_steps_continue_where_the_schedule_allows_it(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    constant = {"schedule": {"name": "constant"}}
    fit(run, sections=constant)
    longer = {**constant, "train": {"steps": 20}}
    fit(run, sections=longer)
    fit(whole, sections=longer)
    assert [(e["step"], e["loss"]) for e in events(run, "train")] == [
        (e["step"], e["loss"]) for e in events(whole, "train")
    ]
    assert load_config(run / "config.toml").train.steps == 20


@pytest.mark.slow
def test_a_compiled_bf16_run_continues_bit_for_bit(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    compiled = {
        "schedule": {"name": "constant"},
        "model": {"dropout": 0.1, "attention_dropout": 0.1},
    }
    for folder, steps in ((run, 4), (run, 8), (whole, 8)):
        train = {"steps": steps, "precision": "bf16", "compile": True}
        fit(folder, sections={**compiled, "train": train})
    assert [(e["step"], e["loss"], e["grad_norm"]) for e in events(run, "train")] == [
        (e["step"], e["loss"], e["grad_norm"]) for e in events(whole, "train")
    ]
    ours, theirs = (
        open_checkpoint(folder / "checkpoints" / "step-00000008") for folder in (run, whole)
    )
    for group in ("model", "optimizer"):
        expected = theirs.tensors(group)
        for name, tensor in ours.tensors(group).items():
            assert torch.equal(tensor, expected[name]), name


def test_another_configuration_is_refused_and_nothing_is_lost(tmp_path):
    run = tmp_path / "run"
    fit(run)
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate"):
        fit(run, sections={"optimizer": {"learning_rate": 0.5}})
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(("resume", "exists"), [("never", True), ("must", False)])
def test_resume_words_refuse(tmp_path, resume, exists):
    run = tmp_path / "run"
    if exists:
        fit(run)
    with pytest.raises(ConfigError, match=f"--resume {resume}"):
        fit(run, resume=resume)


def test_a_named_checkpoint_branches_into_a_new_folder(tmp_path):
    run, branch = tmp_path / "run", tmp_path / "branch"
    fit(run)
    checkpoint = run / "checkpoints" / "step-00000012"
    sections = {"train": {"steps": 15}, "optimizer": {"learning_rate": 1e-3}}
    fit(branch, sections=sections, resume=str(checkpoint))
    assert [e["step"] for e in events(branch, "train")] == [13, 14, 15]


def test_a_checkpoint_in_a_folder_below_is_not_the_runs_own(tmp_path):
    """A branch in a folder around that of the other run is a branch all the same."""
    fit(tmp_path / "runs" / "run", sections={"checkpoint": {"interval": 4, "keep_last": 9}})
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step-00000004"
    run, _ = fit(tmp_path / "runs", resume=str(checkpoint))
    assert not run.folder.holds_checkpoint
    assert [e["step"] for e in events(tmp_path / "runs", "eval")] == [4, 8, 12]
    run, _ = fit(tmp_path / "runs", resume=str(checkpoint))
    assert run.folder.holds_checkpoint
    assert run.folder.checkpoint.step == 12


def test_a_run_that_has_ended_records_unless_another_holds_its_folder(tmp_path):
    run, _ = fit(tmp_path / "run", sections={"train": {"steps": 2, "eval_interval": None}})
    run.record("mine", step=2, value=1.0)
    run.console.say("mine, too")
    assert [e["value"] for e in events(tmp_path / "run", "mine")] == [1.0]
    assert (tmp_path / "run" / "log.txt").read_text().endswith("mine, too\n")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with RunLock(tmp_path / "run" / "run.lock"):
        run.record("mine", step=2, value=2.0)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_best_and_last_are_kept(tmp_path):
    run = tmp_path / "run"
    sections = {"checkpoint": {"interval": 2, "keep_last": 2}}
    trainer, _ = fit(run, sections=sections)
    kept = sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())
    assert set(kept) == {10, 12, trainer.state.best_step}
    bests = [e["step"] for e in events(run, "eval") if e["best"]]
    assert bests[-1] == trainer.state.best_step


class Recorder:
    def __init__(self):
        self.calls = []

    def on_start(self, trainer):
        self.calls.append(("start", trainer.state.step))

    def on_step(self, trainer, step):
        self.calls.append(("step", step.step))
        if step.step == 5:
            trainer.stop("enough")

    def on_eval(self, trainer, metrics):
        self.calls.append(("eval", metrics.step))

    def on_checkpoint(self, trainer, metrics):
        self.calls.append(("checkpoint", metrics.step))

    def on_end(self, trainer, end):
        self.calls.append(("end", end.kind, end.reason))


def test_hooks_see_everything_in_order_and_can_stop(tmp_path):
    hook = Recorder()
    sections = {"checkpoint": {"asynchronous": False}}  # else step 5 may come before it
    fit(tmp_path / "run", sections=sections, hooks=[hook])
    assert hook.calls == [
        ("start", 0),
        ("eval", 0),
        *[("step", step) for step in (1, 2, 3, 4)],
        ("eval", 4),
        ("checkpoint", 4),
        ("step", 5),
        ("checkpoint", 5),
        ("end", "hook", "enough"),
    ]
    assert events(tmp_path / "run", "end")[-1]["kind"] == "hook"


def test_an_object_without_hook_methods_is_refused(tmp_path):
    with pytest.raises(TypeError, match="on_step"):
        fit(tmp_path / "run", hooks=[object()])


def test_patience_stops_and_stays_stopped(tmp_path):
    run = tmp_path / "run"
    # A rate this high diverges to a plateau: the first evaluation stays the best.
    sections = {
        "optimizer": {"learning_rate": 10.0, "clip_norm": 0.0},
        "schedule": {"name": "constant"},
        "train": {"steps": 100, "eval_interval": 2, "patience": 3},
    }
    _, end = fit(run, sections=sections)
    assert end.step < 100
    assert "3 evaluations" in end.reason
    _, again = fit(run, sections=sections)
    assert again.step == end.step


@pytest.fixture
def poisoned_loss(monkeypatch):
    """Losses that are NaN at chosen steps."""
    steps: set[int] = set()
    real = Engine.forward_backward

    def forward_backward(self, batch, step, **options):
        loss = real(self, batch, step, **options)
        return LossSum(math.nan, loss.n_targets) if step in steps else loss

    monkeypatch.setattr(Engine, "forward_backward", forward_backward)
    return steps


def test_a_non_finite_loss_is_skipped_and_leaves_no_trace(tmp_path, poisoned_loss):
    poisoned_loss.update({3, 6})
    run = tmp_path / "run"
    trainer, _ = fit(run)
    assert [e["step"] for e in events(run, "skip")] == [4, 7]
    assert [e["step"] for e in events(run, "train")] == [1, 2, 3, 5, 6, 8, 9, 10, 11, 12]
    assert all(torch.isfinite(p).all() for p in trainer.engine.parameters())


def test_a_loss_that_stays_non_finite_ends_with_70_and_names_the_batch(tmp_path, poisoned_loss):
    poisoned_loss.update(range(5, 100))
    run = tmp_path / "run"
    with pytest.raises(TrainingFailedError, match=r"batch [0-9a-f]{16}") as caught:
        fit(run)
    assert caught.value.exit_code == 70
    assert events(run)[-1]["reason"].startswith("error: ")
    assert not list(run.glob("checkpoints/*/*.tmp*"))


@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_a_failed_save_stops_or_warns_as_asked(tmp_path, monkeypatch, on_error):
    from pentameter.checkpoint.folders.store import CheckpointStore

    def plan(self, contents, *arguments, **options):
        raise StorageError("no space left on device")

    monkeypatch.setattr(CheckpointStore, "plan", plan)
    run = tmp_path / "run"
    sections = {"checkpoint": {"on_error": on_error}}
    with pytest.raises(StorageError, match="no space left"):
        fit(run, sections=sections)  # the last save must succeed, whatever was asked
    assert [e["step"] for e in events(run, "train")][-1] == (4 if on_error == "stop" else 12)
    assert ("step 4 is not saved" in (run / "log.txt").read_text()) == (on_error == "warn")


@pytest.mark.parametrize("log", ["metrics.jsonl", "log.txt"])
def test_a_log_that_cannot_be_synced_is_a_warning_and_no_failed_save(tmp_path, monkeypatch, log):
    run = tmp_path / "run"
    sync = os.fsync

    def full_disk(fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(log):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(fd)

    monkeypatch.setattr(os, "fsync", full_disk)
    fit(run)
    text = (run / "log.txt").read_text()
    assert text.count("warning: cannot write") == text.count(f"{log}: No space left") == 1
    assert [e["step"] for e in events(run, "checkpoint")] == [4, 8, 12]


def test_the_configuration_of_a_run_leaves_its_layouts_micro_batches_out(tmp_path):
    fit(tmp_path / "run")
    assert load_config(tmp_path / "run" / "config.toml").train.micro_batch_size is None
    fit(tmp_path / "asked", sections={"train": {"micro_batch_size": 2}})
    assert load_config(tmp_path / "asked" / "config.toml").train.micro_batch_size == 2


def test_a_text_too_short_for_the_context_is_a_clear_error(tmp_path):
    text = tmp_path / "tiny.txt"
    text.write_text("to be")
    sections = {"data": {"corpus": None, "path": str(text)}}
    with pytest.raises(ConfigError, match="context_length"):
        fit(tmp_path / "run", sections=sections)


def test_fp16_finds_its_loss_scale(tmp_path):
    run = tmp_path / "run"
    trainer, _ = fit(run, sections={"train": {"precision": "fp16", "steps": 30}})
    losses = [e["loss"] for e in events(run, "train")]
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(p).all() for p in trainer.engine.parameters())


def test_a_refused_branch_leaves_the_existing_run_as_it_was(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    fit(run)
    fit(other, sections={"optimizer": {"learning_rate": 0.5}})
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    checkpoint = other / "checkpoints" / "step-00000012"
    with pytest.raises(ConfigError, match="did not start from that"):
        fit(run, sections={"optimizer": {"learning_rate": 0.5}}, resume=str(checkpoint))
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    fit(run)  # and its own command still continues it


@pytest.mark.parametrize("resume", ["atuo", "run"])
def test_resume_from_what_is_no_checkpoint_creates_nothing(tmp_path, resume):
    fit(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"auto, never, must|step-00000012"):
        fit(tmp_path / "new", resume=str(tmp_path / resume) if resume == "run" else resume)
    assert not (tmp_path / "new" / "config.toml").exists()


def test_the_same_command_continues_a_branch(tmp_path):
    run, branch = tmp_path / "run", tmp_path / "branch"
    fit(run)
    command = {
        "resume": str(run / "checkpoints" / "step-00000012"),
        "sections": {"train": {"steps": 30}, "schedule": {"name": "constant"}},
    }

    class Stop:
        def on_step(self, trainer, step):
            if step.step == 14:
                trainer.stop("for a while")

    fit(branch, hooks=[Stop()], **command)
    fit(branch, **command)
    assert [e["step"] for e in events(branch, "train")] == list(range(13, 31))


def test_changed_data_is_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 200)
    sections = {"data": {"corpus": None, "path": str(text)}, "schedule": {"name": "constant"}}
    run = tmp_path / "run"
    fit(run, sections=sections)
    text.write_text("hgfedcba" * 200)
    sections["train"] = {"steps": 20}
    with pytest.raises(ConfigError, match="data has changed since step 12"):
        fit(run, sections=sections)


def test_a_run_that_failed_before_its_first_checkpoint_starts_again_as_asked(tmp_path):
    class Fail:
        def on_step(self, trainer, step):
            raise RuntimeError("out of memory")

    run = tmp_path / "run"
    with pytest.raises(RuntimeError):
        fit(run, hooks=[Fail()])
    _, end = fit(run, sections={"train": {"batch_size": 2}})
    assert end.step == 12
    assert [e["step"] for e in events(run, "train")] == list(range(1, 13))


def test_a_non_finite_validation_loss_ends_with_70(tmp_path):
    sections = {
        "optimizer": {"learning_rate": 1e30, "clip_norm": 0.0},
        "schedule": {"name": "constant"},
        "train": {"eval_interval": 1},
    }
    with pytest.raises(TrainingFailedError, match=r"loss"):
        fit(tmp_path / "run", sections=sections)


def test_a_sample_of_logits_that_are_not_finite_is_left_out_with_a_word(tmp_path, monkeypatch):
    from pentameter.generation import loop as module

    real = module.choose
    monkeypatch.setattr(
        module, "choose", lambda logits, *rest: real(np.full_like(logits, np.nan), *rest)
    )
    run = tmp_path / "run"
    _, end = fit(run, sections={"train": {"sample_interval": 6, "sample_tokens": 5}})
    assert (end.step, end.reason) == (12, "completed")
    said = (run / "log.txt").read_text()
    for step in (0, 6, 12):
        assert f"no sample at step {step}: the model's logits are not finite" in said
    assert not list((run / "samples").glob("*"))


def test_an_evaluation_that_a_signal_cut_off_still_finds_the_best(tmp_path, monkeypatch):
    from pentameter.train import evaluations as module

    whole, run = tmp_path / "whole", tmp_path / "run"
    eight = {"train": {"steps": 8}}
    trainer, _ = fit(whole, sections=eight)
    assert trainer.state.best_step == 8
    real = module.evaluate

    def cut_off(stage, split, *, step, **options):
        return None if step == 8 else real(stage, split, step=step, **options)

    monkeypatch.setattr(module, "evaluate", cut_off)
    fit(run, sections=eight)
    monkeypatch.undo()
    again, _ = fit(run, sections=eight)
    assert again.state.best_step == trainer.state.best_step
    for _ in range(2):  # the second start rewinds to the checkpoint that was saved again
        assert [e["step"] for e in events(run, "checkpoint")] == [4, 8]
        fit(run, sections=eight)
    saved = [
        json.loads((path / "checkpoints" / "step-00000008" / "state.json").read_text())["best"]
        for path in (whole, run)
    ]
    assert saved[0] == saved[1]


def test_a_prompt_the_text_cannot_spell_is_left_out(tmp_path):
    run = tmp_path / "run"
    sections = {"train": {"sample_interval": 12, "sample_prompt": "def ", "sample_tokens": 4}}
    fit(run, sections=sections)
    assert "sample_prompt is left out" in (run / "log.txt").read_text()
    assert len((run / "samples" / "step-00000012.txt").read_text()) == 4


@pytest.mark.parametrize(("local_rank", "verifies"), [(0, True), (1, False)])
def test_one_process_of_each_machine_verifies_the_data(tmp_path, monkeypatch, local_rank, verifies):
    asked = {}

    def opened(data, **arguments):
        asked.update(arguments)
        raise StorageError("seen enough")

    monkeypatch.setattr("pentameter.train.start.open_dataset", opened)
    world = World(rank=2 + local_rank, size=4, local_rank=local_rank, local_size=2)
    with pytest.raises(StorageError, match="seen enough"):
        Trainer(config(), run_dir=tmp_path / "run", world=world).fit()
    assert asked["verify"] is verifies


def test_a_hook_that_fails_in_on_error_hides_no_error(tmp_path):
    class Fails:
        def on_step(self, trainer, step):
            raise ValueError("the real reason")

        def on_error(self, trainer, error):
            raise RuntimeError("another one")

    class Hears:
        def on_error(self, trainer, error):
            self.heard = error

    hears = Hears()
    with pytest.raises(ValueError, match="the real reason"):
        fit(tmp_path, hooks=[Fails(), hears])
    assert str(hears.heard) == "the real reason"
    assert "on_error of Fails: RuntimeError('another one')" in (tmp_path / "log.txt").read_text()


def test_a_trainer_takes_what_names_a_configuration(tmp_path):
    assert Trainer("grammar").config == load_config("grammar")
    (tmp_path / "own.toml").write_text('extends = "grammar"\nseed = 3\n')
    assert Trainer(tmp_path / "own.toml").config.seed == 3
    with pytest.raises(ConfigError, match="did you mean grammar"):
        Trainer("gramar")
