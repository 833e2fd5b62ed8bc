"""Silent corruption: what one process finds, who is named, and that checking changes nothing."""

import pytest
import torch
from late_reads import spoil
from tiny_runs import config, events, fit, hashes

from pentameter.errors import ConfigError, TrainingFailedError
from pentameter.planning.plan import make_plan
from pentameter.train.faults.checking import _odd, _odd_replicas, _word_sum

CHECKED = {"train": {"check_every": 3, "eval_interval": None}, "checkpoint": {"interval": 4}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_each_flipped_bit_changes_the_sum(dtype):
    tensor = torch.randn(7, dtype=dtype)[1:]  # odd, and in the middle of a word
    whole = _word_sum(tensor)
    content = tensor.view(torch.uint8)
    for byte in range(len(content)):
        for bit in range(8):
            content[byte] ^= 1 << bit
            assert _word_sum(tensor) != whole
            content[byte] ^= 1 << bit
    assert _word_sum(tensor) == whole


@pytest.mark.parametrize(
    ("asked", "found", "odd"),
    [
        ((0, 1, 2), "abb", [0]),
        ((1, 2, 0), "aba", [2]),
        ((1, 2, 0), "abc", [1, 2, 0]),
        ((0, 1, 0, 1), "abbb", [0]),  # once
        ((0, 1, 0, 1), "abab", [0, 1]),  # each repeats its own
        ((0, 1, 0, 1), "abac", [1]),  # it differs from itself
        ((0, 0, 0, 0), "abaa", [0]),
    ],
)
def test_who_is_odd(asked, found, odd):
    assert _odd_replicas(asked, [(ord(each),) for each in found]) == odd


def test_a_rank_is_accused_by_a_majority_alone():
    assert _odd("abaa") == "that of rank 1 is odd"
    assert _odd("ab") == "ranks 0 and 1, of which any may be wrong"


def test_a_checked_run_saves_what_another_saves(tmp_path):
    guard = {"rollback_interval": 4, "skips": 1}
    for name, every in (("checked", 3), ("plain", None)):
        with pytest.MonkeyPatch.context() as patch:
            spoil(patch, bad_losses={9, 10}, bad_gradients=set())
            train = {"check_every": every, "steps": 14}
            dropout = {"dropout": 0.1, "attention_dropout": 0.1}
            sections = {"train": train, "guard": guard, "model": dropout}
            fit(tmp_path / name, sections=sections)
    assert events(tmp_path / "checked", "rollback")  # weights were loaded, which is no fault
    assert hashes(tmp_path / "checked", 14) == hashes(tmp_path / "plain", 14)


class Spoil:
    """A hook that changes a number of the optimizer's state after a step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, run, step):
        if step.step == self.step:
            next(iter(run.optimizer.state.values()))["exp_avg"].view(-1)[3] *= 1.5


@pytest.mark.parametrize(("step", "end"), [(5, 6), (7, 8)])
def test_a_change_in_memory_is_found_at_the_next_check_or_save(tmp_path, step, end):
    with pytest.raises(
        TrainingFailedError, match=rf"step {end} .*exp_avg of rank 0 changed in mem"
    ):
        fit(tmp_path / "run", sections=CHECKED, hooks=[Spoil(step)])
    assert [e["step"] for e in events(tmp_path / "run", "checkpoint")] == [4]


def test_layouts_in_which_copies_mix_are_refused():
    grid = {"parallel": {"tensor": 8, "tensor_mode": "3d", "data": 1}}
    with pytest.raises(ConfigError, match=r"train.check_every=3 .*tensor_mode=3d"):
        make_plan(config(**{**CHECKED, **grid}), 64, None)
