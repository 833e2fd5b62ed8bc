"""A run on grids of processes is the one process's, from grid to grid and back to one process."""

from __future__ import annotations

import pytest
import torch

from trials.layout_runs import Run, changed

ROUNDING = 1e-9
TINY = {
    "name": "tiny",
    "model.vocab_size": 17,  # which no grid divides
    "model.context_length": 16,
    "model.n_layers": 2,
    "model.attention.n_heads": 2,
    "model.d_model": 16,
    "model.bias": True,
    "model.dropout": 0.1,
    "model.attention.dropout": 0.1,
    "data.grammar.n_characters": 4000,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
    "schedule.min_learning_rate": 0.0,
    "train.steps": 8,
    "train.batch_size": 8,
    "train.micro_batch_size": 2,
    "train.eval_interval": 2,
    "train.sample_interval": 4,
    "train.sample_prompt": "abcdefghabcdef",
    "train.sample_tokens": 4,  # the last of them outgrow the context
    "train.precision": "fp64",
    "train.compile": False,
    "checkpoint.interval": 2,
    "checkpoint.keep_last": 10,
    "log.interval": 1,
}
GRIDS = (
    (4, {"parallel.tensor": 4, "parallel.tensor_mode": "2d"}),
    (8, {"parallel.tensor": 8, "parallel.tensor_mode": "3d"}),
    (1, {}),
    (8, {"parallel.tensor": 8, "parallel.tensor_mode": "2.5d", "parallel.zero": 1}),
)
"""Processes and layout of each quarter of the run."""


def tensors(run: Run, step: int) -> dict[str, torch.Tensor]:
    return {
        name: tensor.double()
        for name, tensor in run.tensors(step).items()
        if "qkv.bias" not in name  # a key's bias has no gradient but rounding
    }


def test_a_run_goes_on_from_grid_to_grid(runs):
    """Training, evaluation, samples and checkpoints, each layout opening the one before's."""
    tiny = changed("grammar", TINY)
    alone = runs.train(tiny)
    folder = runs.new_folder()
    for quarter, (size, layout) in enumerate(GRIDS):
        steps = {"train.steps": 2 * (quarter + 1)}
        run = runs.train(changed(tiny, layout, steps), size, folder=folder)
        assert (run.end.step, run.end.reason) == (2 * (quarter + 1), "completed")
    for kind, keys in (("train", ("loss", "grad_norm")), ("eval", ("loss", "bits_per_byte"))):
        for key in keys:
            assert run.numbers(key, kind) == pytest.approx(alone.numbers(key, kind), rel=ROUNDING)
    expected = alone.samples()
    assert len(expected) >= 2
    assert {name: run.samples()[name] for name in expected} == expected
    for step in (2, 4, 8):
        ours, theirs = tensors(run, step), tensors(alone, step)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            scale = max(1e-9, float(theirs[name].abs().max()))
            assert float((tensor - theirs[name]).abs().max()) / scale < ROUNDING, name
