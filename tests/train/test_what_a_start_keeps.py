"""The table of docs/reliability.md, "What a start keeps": one test a cell."""

from __future__ import annotations

import shutil
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from custom_optimizers import ByHand
from tiny_runs import config, events, fit

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.errors import ConfigError
from pentameter.parallel.engine import Engine, LossSum
from pentameter.parallel.precision import LossScale
from pentameter.train.keep.saving import tensors_to_save
from pentameter.train.state import EpochSums, TrainState, saved_state

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
STEP, TARGET = 12, 10  # of the checkpoint, and of the one that is rolled back to


def table():
    """(what, use) → kept, anew or earlier."""
    section = PAGE.read_text().split("## What a start keeps")[1].split("\n## ")[0]
    head, _, *rows = [line.strip("| ") for line in section.splitlines() if line.startswith("|")]
    uses = [each.strip(" `-") for each in head.split("|")[1:]]
    cells = {}
    for row in rows:
        what, *words = (each.strip() for each in row.split("|"))
        cells |= {(what, use): word for use, word in zip(uses, words, strict=True)}
    return cells


TABLE = table()


def sections(**others):
    return {
        "train": {
            "steps": 24,
            "eval_interval": 4,
            "eval_tokens": 32,
            "sample_interval": 6,
            "sample_tokens": 2,
        },
        "checkpoint": {"interval": 24, "asynchronous": False, "keep_last": 9},
        "guard": {"spike_factor": 1000.0, "window": 8, "skips": 1, "rollback_interval": 5},
        **others,
    }


def leave_marks(state):
    """Give every field a value that a new run does not have."""
    state.consecutive_skips = 1
    state.evals_without_best = 2
    state.best_step, state.best_loss, state.saved_best_step = 8, 0.5, 8
    state.loss_scale = LossScale(8.0, 3)
    state.epoch = EpochSums(1.0, 2, 3, 4.0)
    state.guard.undone = [(6, 7)]


def seen(trainer):
    groups = tensors_to_save(trainer.engine, trainer.optimizer)
    return SimpleNamespace(
        state=deepcopy(trainer.state),
        weights={name: each.clone() for name, each in groups["model"].items()},
        moments={name: each.clone() for name, each in groups["optimizer"].items()},
        numbers=(trainer.optimizer.n_updates, [g["d"] for g in trainer.optimizer.param_groups]),
        schedule=trainer.config.schedule,
    )


def stored(path):
    """What a checkpoint has, as `seen` shows it of a run."""
    checkpoint = open_checkpoint(path)
    weights, moments = (checkpoint.tensors(group) for group in ("model", "optimizer"))
    return SimpleNamespace(
        state=saved_state(checkpoint)[0],
        weights={name: weights[name][...].clone() for name in weights},
        moments={name: moments[name][...].clone() for name in moments},
        numbers=(checkpoint.step, [pytest.approx(1e-3 * 1.5**checkpoint.step)] * 2),
    )


class Mark:
    """Leaves marks once step 12 was evaluated, and ends the run there."""

    def on_sample(self, trainer, sampled):
        if sampled.step == STEP:
            leave_marks(trainer.state)
            trainer.state.proved_step = STEP
            trainer.stop("marked")


class Look:
    """Keeps what a run begins with, and ends it."""

    def on_start(self, trainer):
        self.seen = seen(trainer)
        trainer.stop("seen")


class Roll:
    """Keeps what a run has before and after a rollback, with marks from between."""

    def on_step(self, trainer, step):
        if step.step == TARGET + 1:
            leave_marks(trainer.state)

    def on_skip(self, trainer, skipped):
        self.before = seen(trainer)

    def on_rollback(self, trainer, rollback):
        assert (rollback.step, rollback.to_step) == (14, TARGET)
        self.after = seen(trainer)
        trainer.stop("seen")


@pytest.fixture(scope="module")
def uses(tmp_path_factory):
    """Use → (what the checkpoint or the run had before, what it has then)."""
    folder = tmp_path_factory.mktemp("uses")
    run = folder / "run"
    fit(run, sections=sections(), optimizer=ByHand, hooks=[Mark()])
    checkpoint = run / "checkpoints" / f"step-{STEP:08d}"
    other = sections(schedule={"name": "constant", "warmup_steps": 0})
    longer = sections()
    longer["train"]["steps"] = 30
    found = {}
    for use, chosen, options in (
        ("resume", sections(), {}),
        ("extend", longer, {"resume": "extend"}),
        ("branch", other, {"resume": str(checkpoint)}),
        ("init-from", other, {"init_from": checkpoint}),
    ):
        place = folder / use
        if use in ("resume", "extend"):
            shutil.copytree(run, place)
        look = Look()
        fit(place, sections=chosen, optimizer=ByHand, hooks=[look], **options)
        found[use] = stored(checkpoint), look.seen
    roll = Roll()
    with pytest.MonkeyPatch.context() as patch:
        real = Engine.forward_backward

        def forward_backward(self, batch, step, **options):
            loss = real(self, batch, step, **options)
            return LossSum(loss.total * (1e6 if step in (12, 13) else 1), loss.n_targets)

        patch.setattr(Engine, "forward_backward", forward_backward)
        fit(folder / "rollback", sections=sections(), optimizer=ByHand, hooks=[roll])
    roll.earlier = stored(folder / "rollback" / "checkpoints" / f"step-{TARGET:08d}")
    found["rollback"] = roll.before, roll.after
    return found, roll.earlier


def fields_of(what):
    """The getters of what a row names: fields of the state, or one of the others by its words."""
    words = {
        "weights": "weights",
        "optimizer's state": "moments",
        "numbers of a custom optimizer": "numbers",
    }
    if what in words:
        return [lambda each: getattr(each, words[what])]

    def getter(path):
        def get(each):
            value = each.state
            for name in path.split("."):
                value = getattr(value, name)
            return value

        return get

    return [getter(path.strip(" `")) for path in what.split(",")]


def equal(ours, theirs):
    if isinstance(ours, dict):
        same = ours.keys() == theirs.keys()
        return same and all(torch.equal(ours[name], theirs[name]) for name in ours)
    return ours == theirs


@pytest.mark.parametrize(("what", "use"), [cell for cell in TABLE if cell[0] != "the schedule"])
def test_a_cell(uses, what, use):
    found, earlier = uses
    before, after = found[use]
    is_state = what.startswith("`")
    new = SimpleNamespace(state=TrainState(), moments={}, numbers=(0, [1e-3, 1e-3]))
    for get in fields_of(what):
        now, word = get(after), TABLE[what, use]
        if is_state:
            assert get(before) != get(new), "the test has to tell kept from anew"
        if (what, use) == ("`guard.undone`", "rollback"):
            assert now == [*get(before), (TARGET + 1, 14)]
        elif (what, use) == ("`guard.rollback_steps`", "rollback"):
            assert (get(earlier), get(before), now) == ([5, TARGET], [5, TARGET], [5])
        elif word == "kept":
            assert equal(now, get(before))
        elif word == "earlier":
            assert equal(now, get(earlier))
            assert not equal(now, get(before))
        else:
            assert word == "anew"
            assert equal(now, get(new))


def test_every_field_of_the_state_has_its_row():
    named = {part.strip(" `") for what, _ in TABLE for part in what.split(",")}
    fields = TrainState.__dataclass_fields__.keys() - {"guard"}
    guard = {f"guard.{name}" for name in TrainState().guard.__dataclass_fields__}
    assert fields | guard <= named


def test_the_schedule(uses):
    found, _ = uses
    assert {use: TABLE["the schedule", use] for use in found} == {
        "resume": "kept",
        "extend": "anew",
        "branch": "anew",
        "init-from": "anew",
        "rollback": "kept",
    }
    schedules = {use: after.schedule for use, (_, after) in found.items()}
    assert schedules["resume"] == schedules["rollback"]
    assert (schedules["resume"].start_step, schedules["extend"].start_step) == (0, STEP)
    assert schedules["branch"].name == schedules["init-from"].name == "constant"


# -- what follows from it --------------------------------------------------------------------------


def worse(step):
    """A rate that spoils the weights after step 8."""
    return 1e-2 if step < 8 else 1.0


def test_a_branch_off_a_run_that_patience_ended_trains_and_keeps_its_own_best(tmp_path):
    chosen = {
        "train": {"steps": 40, "eval_interval": 2, "patience": 3},
        "checkpoint": {"keep_best": True, "keep_last": 1, "interval": 2},
    }
    _, end = fit(tmp_path / "run", sections=chosen, schedule=worse)
    assert end.kind == "patience"
    (newest,) = (tmp_path / "run" / "checkpoints").glob(f"step-{end.step:08d}")
    chosen["optimizer"] = {"learning_rate": 1e-3}
    chosen["train"]["steps"] = end.step + 8
    branch, ended = fit(tmp_path / "branch", sections=chosen, resume=str(newest))
    assert ended.step == end.step + 8
    state = branch.state
    assert end.step <= state.best_step <= ended.step
    own = {each.name for each in (tmp_path / "branch" / "checkpoints").iterdir()}
    assert f"step-{state.best_step:08d}" in own
    evaluated = events(tmp_path / "branch", "eval")
    assert evaluated[0]["step"] == end.step
    assert min(evaluated, key=lambda each: each["loss"])["step"] == state.best_step


def own_rate(step):
    return 1e-2 / (step + 1)


class Stop:
    def on_step(self, trainer, step):
        if step.step == 5:
            trainer.stop("here")


def test_a_schedule_of_the_user_s_is_recorded(tmp_path):
    fit(tmp_path / "run", schedule=own_rate, hooks=[Stop()])
    for options in ({}, {"resume": "must"}):
        with pytest.raises(ConfigError, match=r"schedule was own_rate.*the same schedule="):
            fit(tmp_path / "run", **options)
    shutil.copytree(tmp_path / "run", tmp_path / "extended")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000005"
    fit(tmp_path / "branch", resume=str(checkpoint))  # may train in any other way
    longer = {"train": {"steps": 16}}
    fit(tmp_path / "extended", sections=longer, resume="extend", hooks=[Stop()])
    fit(tmp_path / "extended", sections=longer)
    with pytest.raises(ConfigError, match=r"schedule was the configuration's.*now to be own_rate"):
        fit(tmp_path / "extended", sections=longer, schedule=own_rate)
    fit(tmp_path / "run", schedule=own_rate)
    rates = [event["learning_rate"] for event in events(tmp_path / "run", "train")]
    assert rates == [own_rate(step) for step in range(12)]


def test_a_checkpoint_that_does_not_say_whose_its_schedule_was_is_taken(tmp_path):
    from pentameter.planning.plan import make_plan
    from pentameter.train.user_components import UserComponents

    old = SimpleNamespace(state={"built_by": None}, path=tmp_path)
    plan = make_plan(config(), vocab_size=30)
    for schedule in (None, own_rate):
        UserComponents(schedule=schedule).check_same(old, plan, with_schedule=True)


def test_a_spike_leaves_the_loss_scale_of_fp16_as_it_is(tmp_path, monkeypatch):
    real, scales = Engine.forward_backward, []

    def forward_backward(self, batch, step, **options):
        loss = real(self, batch, step, **options)
        return LossSum(loss.total * (1e3 if step == 15 else 1), loss.n_targets)

    class Watch:
        def on_step(self, trainer, step):
            scales.append(trainer.state.loss_scale.scale)

        def on_skip(self, trainer, skipped):
            skips.append((skipped.step, "spike" in skipped.reason))

    skips = []
    monkeypatch.setattr(Engine, "forward_backward", forward_backward)
    chosen = {
        "train": {"precision": "fp16", "steps": 20},
        "guard": {"spike_factor": 100.0, "window": 8},
    }
    fit(tmp_path, sections=chosen, hooks=[Watch()])
    assert skips[-1] == (16, True)
    assert scales[-1] == scales[-4]
