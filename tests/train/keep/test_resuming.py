"""Which run folders go on, which are refused while nothing is touched, and extending one."""

import dataclasses
import errno
import json
import os
import shutil
import signal

import pytest
from tiny_runs import config, events, fit, seal

from pentameter.checkpoint.folders.opening import read_manifest
from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError, CorruptError, InterruptedRunError, StorageError
from pentameter.train.loop import Trainer

COSINE = {"schedule": {"name": "cosine", "warmup_steps": 2}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("finished") / "run"
    fit(run, sections=COSINE)
    return run


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A run of another configuration."""
    run = tmp_path_factory.mktemp("other") / "run"
    fit(run, sections={**COSINE, "optimizer": {"learning_rate": 0.5}})
    return run


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def content(run):
    return {
        path.relative_to(run): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name != "run.lock"
    }


def refused(run, match, error=ConfigError, **arguments):
    before = content(run)
    arguments.setdefault("sections", COSINE)
    with pytest.raises(error, match=match) as caught:
        fit(run, **arguments)
    assert content(run) == before
    return str(caught.value)


# -- whose folder it is -------------------------------------------------------------------------


def test_a_lost_configuration_is_refused_and_comes_back_from_a_checkpoint(run, finished):
    (run / "config.toml").unlink()
    message = refused(
        run, r"no config\.toml, and holds the checkpoints step-00000008, step-0000001"
    )
    copy = run / "checkpoints" / "step-00000012" / "config.toml"
    assert str(copy) in message
    shutil.copy(copy, run / "config.toml")
    fit(run, sections=COSINE)
    assert events(run, "train") == events(finished, "train")


def test_metrics_of_a_run_without_configuration_and_checkpoint_are_not_cut(run):
    (run / "config.toml").unlink()
    shutil.rmtree(run / "checkpoints")
    refused(run, r"holds plan\.json and metrics\.jsonl of a run that saved no checkpoint")


@pytest.mark.parametrize("foreign", ["plan.json", "checkpoint"])
def test_a_folder_of_two_runs_is_refused(run, other, foreign):
    if foreign == "plan.json":
        shutil.copy(other / foreign, run / foreign)
    else:
        name = "step-00000012"
        shutil.copytree(other / "checkpoints" / name, run / "checkpoints" / "step-00000012.x")
        shutil.rmtree(run / "checkpoints" / name)
        (run / "checkpoints" / "step-00000012.x").rename(run / "checkpoints" / name)
    message = refused(run, r"mixes two runs: plan\.json is of run [0-9a-f]{32}")
    ids = [json.loads((each / "plan.json").read_text())["run_id"] for each in (run, other)]
    assert ids[0] in message
    assert "step-00000012" in message
    assert "--run-dir NEW --resume" in message


def test_a_configuration_that_is_not_the_checkpoints_is_refused(run, other):
    shutil.copy(other / "config.toml", run / "config.toml")
    refused(run, r"optimizer\.learning_rate: 0\.5 → 0\.01")
    sections = {**COSINE, "optimizer": {"learning_rate": 0.5}}
    refused(run, r"step-00000012 says so.*\n.*learning_rate: 0\.01 → 0\.5", sections=sections)


@pytest.mark.parametrize(
    "record", ["[1]", "[" * 100_000, '{"run_id": 3}', '{"run_id": "a", "init_from": {}}']
)
def test_a_plan_that_names_no_run_is_damaged(run, record):
    (run / "plan.json").write_text(record)
    refused(run, r"plan\.json is missing or damaged", CorruptError)


@pytest.mark.parametrize(
    "record",
    ["[1]", '{"a":' * 100_000, '{"a":' * 400 + "1" + "}" * 400, "{", '{"earlier_starts": 3}'],
)
def test_a_damaged_record_of_earlier_starts_stops_nothing(run, record):
    (run / "environment.json").write_text(record)
    fit(run, sections=COSINE)
    assert isinstance(json.loads((run / "environment.json").read_text())["earlier_starts"], list)


@pytest.mark.parametrize("was", [True, False])
def test_a_run_that_is_not_compiled_as_at_its_last_start_says_so(run, was):
    record = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(record | {"compiled": was}))
    fit(run, sections=COSINE)
    said = "the last start of this run was compiled: from step"
    assert (said in (run / "log.txt").read_text()) == was
    assert json.loads((run / "environment.json").read_text())["compiled"] is False


# -- a state whose hashes are right and whose values are not ------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("step", value) for value in (-1, 10**30, 1.5, "12", None, float("nan"), 11, True)],
        *[("tokens", value) for value in (-1, [], "absent")],
        *[("best_loss", value) for value in (float("nan"), "low", float("inf"))],
        *[("loss_scale", value) for value in (None, 3, {"scale": -1.0}, {"scale": "2"}, "absent")],
        *[("epoch", value) for value in ([], {"loss": float("nan")}, {"n_steps": -1})],
        *[("metrics_bytes", value) for value in (-1, "5", "absent")],
        *[("metrics_unwritten", value) for value in ("line", [3])],
        *[("data_hash", value) for value in (3, [])],
        ("last_eval_step", -2),
        ("train_seconds", float("inf")),
        ("log_bytes", None),
        ("consecutive_skips", "absent"),
    ],
)
def test_a_sealed_state_of_impossible_values_is_refused(finished, tmp_path, key, value):
    from pentameter.checkpoint.folders.opening import open_checkpoint
    from pentameter.train.state import saved_state

    step = shutil.copytree(finished / "checkpoints" / "step-00000012", tmp_path / "step-00000012")
    saved_state(open_checkpoint(step))
    seal(step, **{key: value})
    with pytest.raises(CorruptError, match=rf"state\.json is malformed: .*{key}"):
        saved_state(open_checkpoint(step))


def test_a_sealed_state_is_refused_before_anything_is_touched(run):
    seal(run / "checkpoints" / "step-00000012", log_bytes="many")
    refused(run, r"step-00000012/state\.json is malformed: log_bytes='many'", CorruptError)


@pytest.mark.parametrize("layout", [{"data": 1, "depth": 2}])
def test_a_sealed_layout_that_cannot_be_is_refused(run, layout):
    checkpoint = run / "checkpoints" / "step-00000012"
    manifest = dataclasses.replace(read_manifest(checkpoint), layout=layout)
    (checkpoint / "manifest.json").write_bytes(manifest.to_bytes())
    refused(run, r"manifest\.json is malformed: layout: .*depth", CorruptError)


# -- training longer ----------------------------------------------------------------------------


def longer(steps, **sections):
    return {**COSINE, **sections, "train": {"steps": steps, **sections.get("train", {})}}


def test_a_longer_run_is_refused_in_the_keys_that_were_set(run):
    message = refused(run, r"train\.steps: 12 → 20", sections=longer(20))
    assert "decay_steps" not in message
    assert "--resume extend goes on from step 12" in message
    assert "constant" in message
    both = longer(20, optimizer={"learning_rate": 0.5})
    message = refused(run, r"train\.steps: 12 → 20", sections=both)
    assert "optimizer.learning_rate: 0.01 → 0.5" in message
    assert "extend" not in message


class Interrupt:
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, metrics):
        if metrics.step == self.step:
            signal.raise_signal(signal.SIGTERM)


def rates(run):
    return {e["step"]: e["learning_rate"] for e in events(run, "train")}


def test_an_extended_run_begins_its_schedule_anew(run, finished, tmp_path):
    end_of_first = rates(finished)
    _, end = fit(run, sections=longer(20), resume="extend")
    assert (end.step, end.reason) == (20, "completed")
    recorded = load_config(run / "config.toml")
    assert (recorded.schedule.start_step, recorded.train.steps) == (12, 20)
    assert [e["step"] for e in events(run, "train")] == list(range(1, 21))
    found = rates(run)
    assert {step: found[step] for step in end_of_first} == end_of_first
    assert found[14] == pytest.approx(1e-2)  # warmed up again in two steps
    assert found[20] < found[15]
    assert "the schedule begins anew at step 12, up to step 20" in (run / "log.txt").read_text()

    # Interrupted, the same command line goes on, and so does a plain one.
    for number, resume in enumerate(("extend", "auto", "must")):
        again = shutil.copytree(finished, tmp_path / f"again-{number}")
        for step in (14, 17):
            with pytest.raises(InterruptedRunError):
                fit(
                    again,
                    sections=longer(20),
                    resume="extend" if step == 14 else resume,
                    hooks=[Interrupt(step)],
                )
        fit(again, sections=longer(20), resume=resume)
        assert [(e["step"], e["loss"]) for e in events(again, "train")] == [
            (e["step"], e["loss"]) for e in events(run, "train")
        ]
    # The same again does nothing; more steps extend it once more.
    fit(run, sections=longer(20), resume="extend")
    assert rates(run) == found
    refused(
        run,
        r"made 20 steps already, and train\.steps=15 is not",
        sections=longer(15),
        resume="extend",
    )
    fit(run, sections=longer(26), resume="extend")
    assert load_config(run / "config.toml").schedule.start_step == 20
    assert [e["step"] for e in events(run, "train")] == list(range(1, 27))
    message = refused(run, r"extended: --train\.steps 26 continues it", sections=longer(12))
    assert "start_step" not in message
    assert "train.steps: 26 → 12" in message


def test_an_unfinished_run_is_extended_and_patience_counts_anew(tmp_path):
    run = tmp_path / "run"
    sections = {
        "optimizer": {"learning_rate": 10.0, "clip_norm": 0.0},
        "train": {"steps": 100, "eval_interval": 2, "patience": 2},
    }
    _, end = fit(run, sections=sections)
    assert "2 evaluations" in end.reason
    more = {**sections, "train": {**sections["train"], "steps": 200}}
    trainer, again = fit(run, sections=more, resume="extend")
    assert again.step >= end.step + 4
    assert "2 evaluations" in again.reason
    assert trainer.config.schedule.start_step == end.step
    first = min(e["loss"] for e in events(run, "eval")[1:] if e["step"] <= end.step)
    assert trainer.state.best_loss <= first


def test_epochs_can_be_extended(tmp_path):
    run = tmp_path / "run"
    train = {"steps": None, "batch_size": 32}
    fit(run, sections={"data": {"order": "shuffled"}, "train": {**train, "epochs": 1}})
    sections = {"data": {"order": "shuffled"}, "train": {**train, "epochs": 2}}
    refused(run, r"train\.steps: 6 → 11, train\.epochs=2", sections=sections)
    fit(run, sections=sections, resume="extend")
    assert [e["epoch"] for e in events(run, "epoch")] == [1, 2]


@pytest.mark.parametrize("what", ["nothing", "no checkpoint"])
def test_there_must_be_something_to_extend(tmp_path, finished, what):
    run = tmp_path / "run"
    if what == "no checkpoint":
        shutil.copytree(finished, run)
        shutil.rmtree(run / "checkpoints")
    with pytest.raises(ConfigError, match="--resume extend: there is no checkpoint"):
        fit(run, sections=longer(20), resume="extend")


def test_only_the_length_and_the_schedule_may_change(run):
    sections = longer(20, optimizer={"learning_rate": 0.5})
    refused(run, r"learning_rate: 0\.01 → 0\.5", sections=sections, resume="extend")
    linear = {**longer(20), "schedule": {"name": "linear"}}
    fit(run, sections=linear, resume="extend")
    assert load_config(run / "config.toml").schedule.name == "linear"


def test_a_schedule_may_change_in_what_is_still_to_come(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    wsd = {"name": "wsd", "cooldown_steps": 4}
    with pytest.raises(InterruptedRunError):
        fit(run, sections={"schedule": wsd}, hooks=[Interrupt(6)])
    sections = {"schedule": wsd, "train": {"steps": 20}}
    fit(run, sections=sections)
    fit(whole, sections=sections)
    assert rates(run) == rates(whole)
    refused(run, r"train\.steps: 20 → 24", sections={"schedule": wsd, "train": {"steps": 24}})
    other = {**wsd, "cooldown_steps": 5}
    message = refused(run, r"cooldown_steps: 4 → 5", sections={**sections, "schedule": other})
    assert "train.steps: " not in message


def test_a_run_does_not_begin_before_its_schedule(run, tmp_path):
    begun = {**longer(20), "schedule": {**COSINE["schedule"], "start_step": 12}}
    with pytest.raises(ConfigError, match=r"start_step=12, and a new run begins at step 0"):
        fit(tmp_path / "new", sections=begun)
    begun["checkpoint"] = {"keep_last": 9}
    fit(run, sections=begun)  # as `extend` does
    for step in (12, 16, 20):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    for resume in ("auto", "extend"):
        match = r"extended at step 12 .*newest whole checkpoint is step 8"
        refused(run, match, sections=longer(20), resume=resume)


@pytest.mark.parametrize("name", ["plan.json", "config.toml"])
def test_what_a_full_disk_keeps_of_a_run_that_goes_on(run, monkeypatch, name):
    """A Plan that cannot be recorded is a warning; a configuration, which decides, an error."""
    real = os.open

    def full(path, *arguments, **options):
        if f"/{name}.tmp-" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments, **options)

    before = (run / name).read_bytes()
    monkeypatch.setattr(os, "open", full)
    fit(run, sections=COSINE)  # nothing changes, so nothing is written
    sections = {**COSINE, "train": {"micro_batch_size": 2}}
    if name == "plan.json":
        fit(run, sections=sections)
        assert "warning: cannot write" in (run / "log.txt").read_text()
    else:
        with pytest.raises(StorageError, match=r"config\.toml: No space left"):
            fit(run, sections=sections)
    assert (run / name).read_bytes() == before


# -- what the Trainer takes ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss", "loss_fn", "resme"])
def test_an_unknown_argument_of_the_trainer_is_named(name):
    with pytest.raises(TypeError, match=rf"no argument '{name}'; .*run_dir, resume, init_from"):
        Trainer(config(), **{name: 1})


def test_a_path_with_a_nul_is_refused():
    with pytest.raises(ConfigError, match=r"run_dir='a\\x00b' holds a NUL"):
        Trainer(config(), run_dir="a\0b")


def test_a_misspelt_hook_method_is_refused():
    class Hook:
        on_time = True  # no method

        def on_start(self, trainer):
            pass

        def on_setp(self, trainer, step):
            pass

    with pytest.raises(TypeError, match=r"on_setp, which is never called; did you mean on_step"):
        Trainer(config(), hooks=[Hook()])
    del Hook.on_setp
    Trainer(config(), hooks=[Hook()])
