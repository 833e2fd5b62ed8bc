"""Runs counted in epochs: how long they are, what they report, and that a resume loses nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.checkpoint.folders.opening import Checkpoint
from pentameter.checkpoint.format.manifest import Manifest
from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.planning.plan import make_plan, needs_data
from pentameter.train.loop import Trainer
from pentameter.train.state import SavedRun, TrainState, saved_state


def config(**sections) -> Config:
    base = {
        "model": {"context_length": 16, "n_layers": 1, "n_heads": 2, "d_model": 16},
        "data": {"corpus": "grammar", "grammar": {"n_characters": 1000}, "order": "columns"},
        "train": {"epochs": 3, "batch_size": 4, "eval_interval": "epoch", "precision": "fp32"},
        "schedule": {"name": "step", "gamma": 0.5},
        "checkpoint": {"interval": 10},
        "log": {"interval": 1},
    }
    for name, section in sections.items():
        base[name] = {**base[name], **section}
    return Config.model_validate(base)


def events(run, kind):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["event"] == kind]


def test_an_epoch_is_reported_as_the_mean_over_its_targets(tmp_path):
    Trainer(config(), run_dir=tmp_path, quiet=True).fit()
    # 900 tokens in 4 columns of 225: 14 windows of 16 targets
    epochs, steps = events(tmp_path, "epoch"), events(tmp_path, "train")
    assert [(e["epoch"], e["step"], e["steps"]) for e in epochs] == [
        (1, 14, 14),
        (2, 28, 14),
        (3, 42, 14),
    ]
    assert [e["step"] for e in events(tmp_path, "eval")] == [0, 14, 28, 42]
    assert all(e["loss_tokens"] == 4 * 224 for e in epochs)
    for number, epoch in enumerate(epochs):
        losses = [e["loss"] for e in steps[14 * number : 14 * (number + 1)]]
        assert epoch["loss"] == pytest.approx(sum(losses) / 14, rel=1e-6)
    rates = [e["learning_rate"] for e in steps]
    assert rates[13:15] == [1e-3, 5e-4]  # once an epoch
    assert "epoch     1 │ train loss" in (tmp_path / "log.txt").read_text()


def test_a_resume_in_the_middle_of_an_epoch_loses_none_of_it(tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    Trainer(config(), run_dir=whole, quiet=True).fit()

    class StopEarly:
        def on_step(self, trainer, step):
            if step.step == 20:
                trainer.stop("enough")

    Trainer(config(), run_dir=run, hooks=[StopEarly()], quiet=True).fit()
    Trainer(config(), run_dir=run, quiet=True).fit()
    keys = ("epoch", "step", "loss", "perplexity", "loss_tokens", "steps")
    assert [[e[k] for k in keys] for e in events(run, "epoch")] == [
        [e[k] for k in keys] for e in events(whole, "epoch")
    ]


@pytest.mark.parametrize("packing", [False, True])
def test_documents_train_by_the_epoch(tmp_path, packing):
    asked = config(data={"order": "documents", "packing": packing})
    Trainer(asked, run_dir=tmp_path, quiet=True).fit()
    (start,) = events(tmp_path, "start")
    assert events(tmp_path, "epoch")[-1]["epoch"] >= 3  # a step of 4 rows may pass several
    assert events(tmp_path, "epoch")[-1]["step"] == start["steps"]


def test_a_schedule_of_ones_own(tmp_path):
    asked = config(train={"epochs": None, "steps": 5, "eval_interval": None})
    Trainer(asked, run_dir=tmp_path, schedule=lambda step: 0.1 / (step + 1), quiet=True).fit()
    rates = [e["learning_rate"] for e in events(tmp_path, "train")]
    assert rates == [0.1 / n for n in range(1, 6)]


@given(st.integers(1, 500), st.integers(1, 50), st.integers(1, 9))
def test_epochs_take_the_fewest_steps_that_complete_them(rows_per_epoch, batch_size, n_epochs):
    asked = config(train={"epochs": n_epochs, "batch_size": batch_size})
    plan = make_plan(asked, 16, rows_per_epoch)
    assert plan.epoch(plan.steps) >= n_epochs
    assert plan.steps == 1 or plan.epoch(plan.steps - 1) < n_epochs
    assert make_plan(plan.portable_config, 16, rows_per_epoch) == plan


def test_epochs_need_the_data_and_exclude_steps():
    assert needs_data(config(model={"vocab_size": 16}))
    with pytest.raises(ConfigError, match=r"train\.epochs counts in epochs"):
        make_plan(config(), 16)
    with pytest.raises(ValueError, match=r"train\.steps=5 and train\.epochs=3 exclude"):
        config(train={"steps": 5})


def test_a_state_of_before_epochs_were_counted_still_loads(tmp_path):
    record = {**TrainState(step=7).to_json(), "metrics_bytes": 5, "log_bytes": 6}
    del record["epoch"]
    manifest = Manifest("run", 7, "hash", {}, {}, ())
    expected = TrainState(step=7), SavedRun(metrics_bytes=5, log_bytes=6)
    assert saved_state(Checkpoint(tmp_path, manifest, record)) == expected
