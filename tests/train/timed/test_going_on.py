"""A longer `--time` on a complete run: it goes on from before its cool-down."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny_runs

import pentameter as pm
from pentameter.errors import ConfigError
from pentameter.train.timed.time_kept import MovedEnd, TimeKept

TINY = {
    "model.n_layers": 1,
    "model.d_model": 16,
    "model.context_length": 16,
    "train.batch_size": 4,
    "train.precision": "fp32",
    "train.compile": False,
    "train.sample_interval": None,
    "checkpoint.interval": 5,
    "log.interval": 1,
}


@pytest.fixture(autouse=True)
def end_that_stays(trials, monkeypatch):
    """Runs end where they were planned to, whatever the clock says."""
    monkeypatch.setattr(TimeKept, "_moved_end", lambda *_: None)


def trainer_of(time, *, folder="run", hooks=(), **changes):
    return pm.Trainer(
        "novel.txt",
        overrides={**TINY, **changes},
        time=time,
        run_dir=folder,
        hooks=hooks,
        quiet=True,
    )


def train(time, **options):
    trainer = trainer_of(time, **options)
    trainer.fit()
    return trainer


@pytest.fixture
def short():
    """A complete run of a minute, its last step, and the step before its cool-down."""
    trainer = train("60s")
    schedule, steps = trainer.run.config.schedule, trainer.run.plan.steps
    return trainer, steps, steps - schedule.cooldown_steps


def steps_logged(folder):
    return [each["step"] for each in tiny_runs.events(folder, "train")]


def test_the_checkpoint_before_the_cool_down_is_kept(short):
    trainer, steps, uncooled = short
    assert trainer.run.config.checkpoint.keep_before_cooldown
    assert steps - uncooled > 2 * 5  # two later ones were saved, and it was kept beside them
    kept = sorted(path.name for path in (trainer.run_dir / "checkpoints").iterdir())
    assert f"step-{uncooled:08d}" in kept
    assert f"step-{steps:08d}" in kept


def test_it_is_what_one_run_of_that_length_is(short, tmp_path):
    trainer, steps, uncooled = short
    longer = train("2m")
    run, schedule = longer.run, longer.run.config.schedule
    assert run.folder.run_id == trainer.run.folder.run_id
    assert run.folder.checkpoint.step == uncooled
    made = run.plan.steps - uncooled
    assert 0.8 * 60 < 2.0 * made < 60  # the rest of the time
    assert schedule.cooldown_steps == pytest.approx(0.4 * run.plan.steps, abs=1)
    assert steps_logged(longer.run_dir) == [*range(1, run.plan.steps + 1)]
    resumed = tiny_runs.events(longer.run_dir, "resume")[-1]
    assert (resumed["step"], resumed["steps"]) == (uncooled, run.plan.steps)
    assert resumed["reached_step"] == steps
    log = (longer.run_dir / "log.txt").read_text()
    assert f"resume  from step {uncooled}; steps {uncooled + 1} to {steps} are made again" in log
    whole = pm.Trainer(run.plan.config, run_dir=tmp_path / "whole", quiet=True)
    whole.fit()
    last = run.plan.steps
    assert tiny_runs.hashes(tmp_path / "whole", last) == tiny_runs.hashes(longer.run_dir, last)


@pytest.mark.parametrize("after", [0, 2, 12])
def test_killed_and_resumed_it_has_no_differing_bit(short, tmp_path, after):
    trainer, _, uncooled = short
    shutil.copytree(trainer.run_dir, tmp_path / "killed")

    class KilledError(Exception):
        pass

    class Kills:
        def on_start(self, run):
            if after == 0:
                raise KilledError

        def on_step(self, run, step):
            if step.step == uncooled + after:
                raise KilledError

    longer = train("2m")
    last = longer.run.plan.steps
    assert uncooled + after < last
    with pytest.raises(KilledError):
        train("2m", folder=str(tmp_path / "killed"), hooks=[Kills()])
    again = train("2m", folder=str(tmp_path / "killed"))
    assert again.run.plan.steps == last
    assert steps_logged(tmp_path / "killed") == [*range(1, last + 1)]
    assert tiny_runs.hashes(tmp_path / "killed", last) == tiny_runs.hashes(longer.run_dir, last)


def test_killed_before_anything_was_removed_it_goes_on_all_the_same(short, trials):
    trainer_of("2m")  # which has recorded what it chose
    n_tried = len(trials)
    longer = train("2m")
    assert len(trials) == n_tried
    assert longer.run.folder.checkpoint.step == short[2]


def test_it_goes_on_again_and_a_moved_end_stays(short, monkeypatch):
    second = train("2m").run

    def moved_end(self, run, step):
        at = second.plan.steps - second.config.schedule.cooldown_steps + 3
        return MovedEnd(step + 9, 6) if step == at else None

    monkeypatch.setattr(TimeKept, "_moved_end", moved_end)
    third = train("4m")
    uncooled = second.plan.steps - second.config.schedule.cooldown_steps
    assert third.run.plan.steps == uncooled + 3 + 9
    assert third.run.config.schedule.cooldown_steps == 6
    assert steps_logged(third.run_dir) == [*range(1, third.run.plan.steps + 1)]
    record = json.loads((third.run_dir / "time.json").read_text())
    assert (record["asked"]["seconds"], record["seconds_before"]) == (240.0, 120.0)
    assert train("4m").run.state.step == third.run.plan.steps


def test_a_shorter_time_and_other_settings_are_refused(short):
    with pytest.raises(ConfigError, match=r"--time 1 min 0 s; ask for that .* or for more to go"):
        trainer_of("50s")
    with pytest.raises(ConfigError, match="of --time with other settings"):
        trainer_of("2m", **{"seed": 3})
    with pytest.raises(ConfigError, match="holds a run"):
        pm.Trainer("novel.txt", overrides=TINY, time="2m", run_dir="run", resume="never")


def test_what_cannot_go_on_says_why(short):
    trainer, steps, uncooled = short
    folder = trainer.run_dir / "checkpoints"
    for path in folder.iterdir():
        if int(path.name[5:]) <= uncooled:
            shutil.rmtree(path)
    with pytest.raises(ConfigError, match="no checkpoint from before its learning rate fell"):
        trainer_of("2m")
    shutil.rmtree(folder / f"step-{steps:08d}")
    with pytest.raises(ConfigError, match="that is not complete; finish it"):
        trainer_of("2m")
