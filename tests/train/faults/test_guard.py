"""The guard: what is a spike, and what a run does about it: skip, roll back, give up."""

import json
import math
import random
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_reads import run_counted
from tiny_runs import config, events, fit, hashes, recorded

from pentameter.config.fingerprint import config_hash, diff_configs
from pentameter.config.schema import GuardConfig
from pentameter.errors import TrainingFailedError
from pentameter.parallel.engine import Engine, LossSum
from pentameter.processes.group.world import World
from pentameter.train.faults.guard import LEAST_SCATTER, NORMAL_SCATTER, Guard, spike_limits
from pentameter.train.state import TrainState

WINDOW = 8
CPU = torch.device("cpu")
usual = st.floats(0.5, 4.0)
anything = st.one_of(usual, st.floats(1e-3, 1e6), st.sampled_from([math.nan, math.inf, -math.inf]))


# -- the decision ---------------------------------------------------------------------------------


@given(st.lists(st.tuples(usual, usual), min_size=WINDOW, max_size=WINDOW), st.floats(1, 50))
def test_the_limits_are_median_and_scatter(steps, factor):
    history = np.array(steps).T
    median = np.quantile(history, 0.5, axis=1, method="lower")
    deviations = np.abs(history - median[:, None])
    scatter = NORMAL_SCATTER * np.quantile(deviations, 0.5, axis=1, method="lower")
    expected = median + factor * np.maximum(scatter, LEAST_SCATTER * median)
    assert spike_limits(torch.from_numpy(history), factor).tolist() == expected.tolist()


def decisions(guard, steps):
    return [bool(guard.judge(LossSum(loss * 4, 4), norm)) for loss, norm in steps]


@settings(max_examples=30)
@given(st.lists(st.tuples(anything, anything), min_size=1, max_size=40), st.booleans())
def test_a_guard_that_begins_with_the_state_decides_as_one_that_went_on(steps, halts):
    chosen = GuardConfig(spike_factor=5.0, window=WINDOW, skips=2)
    state = TrainState()
    undisturbed = decisions(Guard(chosen, state, CPU, halts=halts), steps)
    for step, expected in zip(steps, undisturbed, strict=True):
        (found,) = decisions(Guard(chosen, state, CPU, halts=halts), [step])
        assert found == expected
        state = TrainState(
            guard=state.guard, consecutive_skips=state.consecutive_skips + 1 if found else 0
        )
        if not found:
            state.guard.add(*step, WINDOW)
    assert len(state.guard.losses) <= WINDOW
    assert all(map(math.isfinite, state.guard.losses + state.guard.norms))


def test_nothing_is_a_spike_before_the_window_is_full_and_none_raises_the_limit_of_the_next():
    chosen = GuardConfig(spike_factor=5.0, window=WINDOW)
    guard = Guard(chosen, TrainState(), CPU, halts=False)
    steps = [(2.0, 1.0)] * (WINDOW - 1) + [(9.0, 1.0)] + [(9.0, 1.0)] * 40 + [(2.0, 30.0), (2.0, 1)]
    assert decisions(guard, steps) == [False] * WINDOW + [True] * 41 + [False]


def test_after_too_many_in_a_row_a_guard_that_halts_leaves_everything_out():
    chosen = GuardConfig(skips=2)
    steps = [(1, 1), (math.nan, 1), (1, math.inf), (1, 1), *[(math.nan, 1)] * 3, (1, 1), (1, 1)]
    halting = decisions(Guard(chosen, TrainState(), CPU, halts=True), steps)
    assert halting == [0, 1, 1, 0, 1, 1, 1, 1, 1]
    going_on = decisions(Guard(chosen, TrainState(), CPU, halts=False), steps)
    assert going_on == [0, 1, 1, 0, 1, 1, 1, 0, 0]


def test_a_configuration_without_a_guard_hashes_as_before_there_was_one():
    plain = config()
    assert config_hash(plain) == config_hash(config(guard={"skips": 9, "window": 9}))
    guarded = config(guard={"spike_factor": 20.0, "rollback_interval": 5})
    assert config_hash(guarded) == config_hash(
        config(guard={"spike_factor": 20.0, "rollback_interval": 5, "rollbacks": 9})
    )
    assert diff_configs(plain, guarded) == [
        "guard.spike_factor: unused → 20.0",
        "guard.window: unused → 128",
        "guard.skips: unused → 3",
        "guard.rollback_interval: unused → 5",
    ]


# -- whole runs -----------------------------------------------------------------------------------


def guarded(**sections):
    """Twenty-four steps that may roll back to the multiples of five."""
    return {
        "train": {"steps": 24, "eval_interval": None, **sections.pop("train", {})},
        "checkpoint": {"interval": 24, "asynchronous": False},
        "guard": {
            "spike_factor": 1000.0,  # so few noisy steps have little scatter
            "window": WINDOW,
            "skips": 1,
            "rollback_interval": 5,
            **sections.pop("guard", {}),
        },
        **sections,
    }


@pytest.fixture
def planted(monkeypatch):
    """A function that multiplies the loss of some steps, 0-based, and sees that nothing else of a
    run changes."""

    def plant(factors):
        real = Engine.forward_backward

        def forward_backward(self, batch, step, **options):
            loss = real(self, batch, step, **options)
            return LossSum(loss.total * factors.get(step, 1), loss.n_targets)

        monkeypatch.setattr(Engine, "forward_backward", forward_backward)

    return plant


TWICE = dict.fromkeys((12, 13, 14, 15, 20), 1e6)
"""Steps 13 and 14 roll back to 10, 15 and 16 to 5; 21 is skipped."""
SKIPPED, ROLLED_BACK = [13, 14, 15, 16, 21], [(14, 10), (16, 5)]


def said(run):
    return (
        [e["step"] for e in events(run, "skip")],
        [(e["step"], e["to_step"]) for e in events(run, "rollback")],
    )


def test_a_run_skips_rolls_back_further_each_time_and_goes_on(tmp_path, planted):
    planted(TWICE)
    sections = guarded()
    _, end = fit(tmp_path / "run", sections=sections)
    assert (end.step, end.reason) == (24, "completed")
    assert said(tmp_path / "run") == (SKIPPED, ROLLED_BACK)
    made = [e["step"] for e in events(tmp_path / "run", "train")]
    assert made == [step for step in range(1, 25) if step not in SKIPPED]
    guard = json.loads((tmp_path / "run/checkpoints/step-00000024/state.json").read_text())["guard"]
    assert guard["undone"] == [[11, 14], [6, 16]]
    assert guard["rollback_steps"] == [20]
    assert len(guard["losses"]) == len(guard["norms"]) == WINDOW
    log = (tmp_path / "run/log.txt").read_text()
    assert "steps 6 to 16 are undone, and their batches skipped" in log
    assert "pentameter data" in log
    assert "grammar, document 0, tokens" in log


def test_a_rollback_leaves_the_weights_of_the_step_that_it_returns_to(tmp_path, planted):
    """Nothing is made after it, so the last checkpoint holds the tensors of the one before."""
    planted(dict.fromkeys((22, 23), 1e6))
    fit(tmp_path / "run", sections=guarded())
    assert said(tmp_path / "run") == ([23, 24], [(24, 20)])
    assert hashes(tmp_path / "run", 24) == hashes(tmp_path / "run", 20)


def test_a_run_stopped_after_each_step_of_the_window_decides_as_one_that_was_not(tmp_path, planted):
    planted(TWICE)

    class StopEach:
        def stop(self, trainer, step):
            if 10 <= step.step <= 17:
                trainer.stop("each step")

        on_step = on_skip = stop

    fit(tmp_path / "whole", sections=guarded())
    n_starts = 0
    while True:
        n_starts += 1
        _, end = fit(tmp_path / "run", sections=guarded(), hooks=[StopEach()])
        if end.step == 24:
            break
    assert n_starts == 9
    assert said(tmp_path / "run") == said(tmp_path / "whole")
    losses = [
        [(e["step"], e["loss"], e["grad_norm"]) for e in events(tmp_path / name, "train")]
        for name in ("run", "whole")
    ]
    assert losses[0] == losses[1]
    assert hashes(tmp_path / "run", 24) == hashes(tmp_path / "whole", 24)


@pytest.mark.parametrize("late", [True, False], ids=["late", "at once"])
def test_on_a_gpu_the_device_decides_alike_and_is_read_no_more_often(
    tmp_path, planted, monkeypatch, late
):
    planted(TWICE)
    fit(tmp_path / "whole", sections={**guarded(), "log": {"interval": 7}})
    chosen = config(**{**guarded(), "log": {"interval": 7}})
    reads, _ = run_counted(World(), chosen, tmp_path / "run", late, {1}, set())
    planted({1: math.nan})
    fit(tmp_path / "whole-with-a-nan", sections={**guarded(), "log": {"interval": 7}})
    assert recorded(tmp_path / "run") == recorded(tmp_path / "whole-with-a-nan")
    assert hashes(tmp_path / "run", 24) == hashes(tmp_path / "whole-with-a-nan", 24)
    assert [e["step"] for e in events(tmp_path / "run", "skip")] == [2, *SKIPPED]
    if late:  # logged at 1, 7, 21 (skipped), 24; saved at 5, 10, 20; 14 and 16 lie between
        quiet = set(range(2, 24)) - {5, 7, 10, 14, 15, 16, 20, 21}
        assert not quiet & reads.keys()


def test_one_nan_is_skipped_and_nothing_else_happens(tmp_path, planted):
    planted({13: math.nan})
    _, end = fit(tmp_path / "run", sections=guarded())
    assert end.reason == "completed"
    assert said(tmp_path / "run") == ([14], [])


def garbage_text(path, first, last):
    """A text of words, whose tokens for the steps `first` to `last` are random signs."""
    drawn = random.Random(1)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "ate"]
    text = ""
    while len(text) < 64 * 60:
        text += " ".join(drawn.choice(words) for _ in range(8)) + "\n"
    garbage = "".join(drawn.choice("QXZJKVW#%&@!") for _ in range(64 * (last - first + 1)))
    path.write_text(text[: 64 * (first - 1)] + garbage + text[64 * (first - 1) :])


def test_garbage_documents_are_skipped_and_named(tmp_path, monkeypatch):
    # Three of the four rows at once, as a large batch is taken in several.
    monkeypatch.setattr("pentameter.evaluate.split.EVALUATION_TOKENS", 48)
    garbage_text(tmp_path / "text.txt", 41, 44)
    sections = guarded(
        train={"steps": 50},
        guard={"spike_factor": 20.0, "window": 16, "rollback_interval": 10},
        data={
            "corpus": None,
            "path": str(tmp_path / "text.txt"),
            "order": "sequential",
            "tokenizer": "char",
            "validation_fraction": 0.0,
        },
    )
    sections["train"]["micro_batch_size"] = 2
    fit(tmp_path / "run", sections=sections)
    assert said(tmp_path / "run") == ([41, 42, 43, 44], [(42, 40), (44, 30)])
    first, second = events(tmp_path / "run", "rollback")
    for each, begin in ((first, 41), (second, 43)):
        highest = re.search(r"are row (\d+) \(", each["reason"])[1]
        assert f"--step {begin} --rows {highest} shows the first of them" in each["reason"]
        # 64 tokens a step, of which each row reads 16 and the next one.
        rows = {f"tokens {64 * (begin - 1) + 16 * row:,} to" for row in range(4)}
        assert sum(words in each["reason"] for words in rows) == 3
        assert f"{tmp_path / 'text.txt'}, document 0" in each["reason"]
    losses = [e["loss"] for e in events(tmp_path / "run", "train")]
    assert max(losses[30:]) < 2.2


def test_a_rate_too_high_rolls_back_and_then_gives_up_with_what_it_had(tmp_path):
    rate = SimpleNamespace(schedule=lambda step: 1e-2 if step < 12 else 1e8)
    with pytest.raises(TrainingFailedError, match="no checkpoint left to roll back to") as error:
        fit(tmp_path / "run", sections=guarded(), schedule=rate.schedule)
    assert "row" in str(error.value)
    assert "optimizer.learning_rate" in str(error.value)
    assert error.value.exit_code == 70
    assert [to_step for _, to_step in said(tmp_path / "run")[1]] == [10, 5]
    assert hashes(tmp_path / "run", 10)
    with pytest.raises(TrainingFailedError, match="no checkpoint left"):  # the same again
        fit(tmp_path / "run", sections=guarded(), schedule=rate.schedule)


def test_more_rollbacks_than_allowed_and_a_lost_checkpoint_give_up(tmp_path, planted):
    planted(TWICE)
    once = guarded(guard={"rollbacks": 1})
    with pytest.raises(TrainingFailedError, match=r"step 16: .* 1 rollbacks are made"):
        fit(tmp_path / "once", sections=once)

    class Lose:
        def on_skip(self, trainer, skip):
            shutil.rmtree(trainer.run_dir / "checkpoints/step-00000010", ignore_errors=True)

    with pytest.raises(TrainingFailedError, match="checkpoint to roll back to, step 10, is gone"):
        fit(tmp_path / "lost", sections=guarded(), hooks=[Lose()])
    fit(tmp_path / "once", sections=guarded(guard={"rollbacks": 2}))  # with more, it goes on
    assert said(tmp_path / "once") == (SKIPPED, ROLLED_BACK)


def test_a_branch_does_not_roll_back_to_checkpoints_of_another_folder(tmp_path, planted):
    fit(tmp_path / "run", sections=guarded())
    planted(dict.fromkeys((22, 23), 1e6))
    given = str(tmp_path / "run/checkpoints/step-00000020")
    with pytest.raises(TrainingFailedError, match="no checkpoint left to roll back to"):
        fit(tmp_path / "branch", sections=guarded(), resume=given)
