"""Checkpoints that two processes write beside training."""

import os
import sys
from pathlib import Path

import pytest
from asynchronous_worlds import fail_to_write, train
from tiny_runs import events

from pentameter.checkpoint.folders.opening import open_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from layout_worlds import run_world


def tensor_hashes(run, step):
    manifest = open_checkpoint(run / "checkpoints" / f"step-{step:08d}").manifest
    return {f.name: f.sha256 for f in manifest.files if f.name.endswith(".safetensors")}


@pytest.mark.parametrize("zero", [0, 1])
def test_a_checkpoint_is_committed_once_all_have_written(tmp_path, zero):
    beside, waited = tmp_path / "beside", tmp_path / "waited"
    for order in run_world(2, train, beside, True, zero):
        assert order.index("saved 4") > order.index(6)
        assert order[-1] == "saved 12"
    run_world(2, train, waited, False, zero)
    for step in (4, 8, 12):
        hashes = tensor_hashes(beside, step)
        assert hashes == tensor_hashes(waited, step)
        assert len(hashes) == 4  # each writes a part of model and optimizer
    curves = [[(e["step"], e["loss"]) for e in events(run, "train")] for run in (beside, waited)]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_write_that_fails_in_one_process_is_an_error_in_both(tmp_path, rank):
    for error, exit_code in run_world(2, fail_to_write, tmp_path / "run", rank):
        assert "cannot write" in error
        assert "step-00000008" in error
        assert exit_code == 74
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-00000004"]
