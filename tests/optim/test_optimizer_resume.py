"""Every optimizer continues as if never stopped: state and schedule together, through a run."""

import json

import pytest
import torch
from cache_of_a_folder import cache_of_a_file  # noqa: F401

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.config.schema import Config
from pentameter.train.loop import Trainer

OPTIMIZERS = {
    "adamw": {"weight_decay": 0.1},
    "adam": {"weight_decay": 0.01},
    "sgd": {"learning_rate": 0.5, "momentum": 0.9},
    "muon": {"weight_decay": 0.1},
}


def fit(run, *, stop_at=None, precision="fp32", optimizer=None):
    """Train six steps, or only up to one of them, in two micro-batches each."""
    config = Config.model_validate(
        {
            "model": {
                "context_length": 16,
                "n_layers": 1,
                "n_heads": 2,
                "d_model": 16,
                "dropout": 0.1,
                "n_experts": 2,  # Muon has a rule of its own for them
                "d_expert": 16,
            },
            "data": {"corpus": "grammar", "grammar": {"n_characters": 3000}},
            "optimizer": {"learning_rate": 1e-2, **(optimizer or {})},
            "schedule": {"name": "wsd", "warmup_steps": 2, "cooldown_steps": 3},
            "train": {
                "steps": 6,
                "batch_size": 4,
                "micro_batch_size": 2,
                "device": "cpu",
                "precision": precision,
                "compile": False,
            },
            "log": {"interval": 1},
        }
    )

    class Stopper:
        def on_step(self, trainer, metrics):
            if metrics.step == stop_at:
                trainer.stop("halfway")

    trainer = Trainer(config, run_dir=run, hooks=[Stopper()], quiet=True)
    trainer.fit()
    return trainer.run


def steps(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    keys = ("step", "loss", "grad_norm", "learning_rate")
    return [[line[key] for key in keys] for line in lines if line["event"] == "train"]


def assert_same(run, whole):
    assert steps(run) == steps(whole)
    ours, theirs = (open_checkpoint(r / "checkpoints" / "step-00000006") for r in (run, whole))
    for group in ("model", "optimizer"):
        expected = theirs.tensors(group)
        tensors = ours.tensors(group)
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path, name):
    run, whole = tmp_path / "run", tmp_path / "whole"
    optimizer = {"name": name, **OPTIMIZERS[name]}
    assert fit(run, stop_at=3, optimizer=optimizer).state.step == 3
    fit(run, optimizer=optimizer)
    fit(whole, optimizer=optimizer)
    assert_same(run, whole)
    assert steps(run)[-1][1] < steps(run)[0][1]


def test_fp16_saves_its_loss_scale_and_goes_on_from_it(tmp_path, monkeypatch):
    """From a scale that overflows: what skips taught it is not learnt again after a resume."""
    monkeypatch.setattr(
        "pentameter.parallel.precision.LossScale.__init__.__defaults__", (2.0**19, 0, 9)
    )
    run, whole = tmp_path / "run", tmp_path / "whole"
    stopped = fit(run, stop_at=4, precision="fp16").state.loss_scale
    assert stopped.scale < 2.0**19
    assert stopped.good_steps > 0
    resumed = fit(run, precision="fp16")
    assert resumed.state.loss_scale == fit(whole, precision="fp16").state.loss_scale
    assert_same(run, whole)
    skips = [line for line in (run / "metrics.jsonl").open() if '"skip"' in line]
    assert len(steps(run)) + len(skips) == 6
