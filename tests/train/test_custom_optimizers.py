"""A run with an optimizer of the user's goes on after a stop to the bit, or its first save says why
it cannot."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from custom_optimizers import (
    ByHand,
    InLists,
    Matrices,
    Quantized,
    Unkeepable,
    fit,
    go_on,
    whole_and_stopped,
)
from tiny_runs import events, hashes

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.checkpoint.state.custom_optimizer import FILE_NAME
from pentameter.errors import ConfigError, CorruptError

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from layout_worlds import run_world


def schedule_free(groups):
    found = pytest.importorskip("schedulefree").AdamWScheduleFree(groups)
    found.train()
    return found


def prodigy(groups):
    return pytest.importorskip("prodigyopt").Prodigy(groups)


def eight_bits(groups):
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(groups, min_8bit_size=64)


TORCHS = (
    "Adafactor",
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
)
OWN = [ByHand, Matrices, Quantized, InLists, schedule_free, prodigy, eight_bits]


def values_of(run, step):
    return json.loads((run / "checkpoints" / f"step-{step:08d}" / FILE_NAME).read_text())


def losses(run):
    return [event["loss"] for event in events(run, "train")]


@pytest.mark.parametrize("made", [*OWN, *(getattr(torch.optim, name) for name in TORCHS)])
def test_it_goes_on_to_the_bit(tmp_path, made):
    fit(tmp_path / "whole", made)
    fit(tmp_path / "run", made, stop=5)
    resumed = fit(tmp_path / "run", made)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert hashes(tmp_path / "run", 8) == hashes(tmp_path / "whole", 8)
    assert values_of(tmp_path / "run", 8) == values_of(tmp_path / "whole", 8)
    if made is ByHand:
        ((first, state), *_) = resumed.optimizer.state.items()
        assert type(state["n"]) is int
        assert state["none"] is None
        assert state["fast"].dtype == torch.bfloat16
        assert state["fast"].shape == first.shape
        assert resumed.optimizer.history[-1] == (8, float("inf"))
    if made is Quantized:
        assert type(next(iter(resumed.optimizer.state.values()))["momentum"]).__name__ == "Eighth"


LAYOUTS = {
    "data": {"parallel": {"data": 2}},
    "zero": {"parallel": {"data": 2, "zero": 3}},
    "tensor": {"parallel": {"tensor": 2}},
    "pipeline": {"parallel": {"pipeline": 2}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_goes_on_to_the_bit_on_every_layout(tmp_path, layout):
    settings = LAYOUTS[layout]
    assert run_world(2, whole_and_stopped, tmp_path, ByHand, settings) == ["", ""]
    assert hashes(tmp_path / "run", 8) == hashes(tmp_path / "whole", 8)
    assert values_of(tmp_path / "run", 8) == values_of(tmp_path / "whole", 8)


def test_another_layout_takes_its_numbers(tmp_path):
    fit(tmp_path, ByHand, stop=5)
    assert run_world(2, go_on, tmp_path, ByHand, LAYOUTS["zero"]) == ["", ""]
    assert values_of(tmp_path, 8)["optimizers"][""]["attributes"]["n_updates"] == 8
    state = open_checkpoint(tmp_path / "checkpoints" / "step-00000008").tensors("optimizer")
    assert state["token_embedding.weight.fast"].dtype == torch.bfloat16


class PerStage(ByHand):
    """One with a number that follows from the parameters that this process has."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["own"] = sum(p.numel() for p in group["params"])


def test_numbers_of_stages_go_on_in_their_layout_alone(tmp_path):
    settings = {**LAYOUTS["pipeline"], "model": {"tied_head": False}}
    assert run_world(2, whole_and_stopped, tmp_path, PerStage, settings) == ["", ""]
    assert hashes(tmp_path / "run", 8) == hashes(tmp_path / "whole", 8)
    with pytest.raises(ConfigError, match="other numbers for some parameters of a group"):
        fit(tmp_path / "run", PerStage, model={"tied_head": False})


class PerRank(ByHand):
    """One with a number that differs between processes."""

    def step(self, closure=None):
        super().step()
        self.rank = torch.distributed.get_rank()


@pytest.mark.parametrize(
    ("made", "layout", "why"),
    [
        (Matrices, "zero", "GG/1 for .* of which each process has a part.*set parallel.zero to 0"),
        (PerRank, "data", "other values on one process than on another.*attributes"),
        (InLists, "zero", r"slow/0: .*tensors that processes have a part of belong into state"),
    ],
)
def test_what_cannot_be_kept_on_a_layout_is_refused(tmp_path, made, layout, why):
    for said in run_world(2, whole_and_stopped, tmp_path, made, LAYOUTS[layout]):
        assert re.search(why, said), said
    assert not list((tmp_path / "whole" / "checkpoints").glob("step-*"))


def test_what_cannot_be_kept_at_all_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"Unkeepable keeps helper for .*: a builtins.method"):
        fit(tmp_path, Unkeepable)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_what_it_was_made_with_is_the_code_s_to_say(tmp_path):
    class Other(ByHand):
        def __init__(self, groups):
            super().__init__(groups)
            for group in self.param_groups:
                group["betas"] = (0.8, 0.9)

    fit(tmp_path, ByHand, stop=5)
    resumed = fit(tmp_path, Other)
    assert {group["betas"] for group in resumed.optimizer.param_groups} == {(0.8, 0.9)}
    assert resumed.optimizer.n_updates == 8


def test_a_malformed_file_is_said_to_be_one(tmp_path):
    from pentameter.checkpoint.state.custom_optimizer import CustomLoad

    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.NAdam([parameter])
    for content in (
        {"optimizers": []},
        {"optimizers": {"": {}}},
        {"optimizers": {"": {"parameters": {"p": {"state": {"x": []}}}}}},
        {"optimizers": {"": {"parameters": {}, "shared": None, "attributes": {}}}},
    ):
        data = json.dumps({"format_version": 1, **content}).encode()
        with pytest.raises(CorruptError, match=r"optimizer\.json"):
            CustomLoad(optimizer, {"p": parameter}, {}, data)
    other = {"format_version": 1, "optimizers": {"inner/": {}}}
    with pytest.raises(ConfigError, match="give Trainer the same optimizer="):
        CustomLoad(optimizer, {"p": parameter}, {}, json.dumps(other).encode())
