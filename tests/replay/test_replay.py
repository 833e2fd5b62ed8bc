"""A replayed step is the run's, to the bit; where it is not, the reason is told."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cache_of_a_folder import cache_of_a_file  # noqa: F401
from late_reads import spoil
from tiny_runs import events, fit

from pentameter.cli.main import main
from pentameter.cli.replay import run as replay
from pentameter.errors import ConfigError, CorruptError, TrainingFailedError
from pentameter.planning.layouts.layout import make_layout
from pentameter.replay.record import Route, RunRecord, StepNumbers, read_record

KEEPS = {"interval": 4, "keep_last": 9}
PLAIN = {"checkpoint": KEEPS, "train": {"eval_interval": None}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 12 steps, saved every 4, with a bias on which Adam steps by the sign of rounding."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    fit(folder, sections={**PLAIN, "model": {"qkv_bias": True}})
    return folder


def copied(folder, tmp_path):
    """A copy of a run folder that a test may damage."""
    import shutil

    return Path(shutil.copytree(folder, tmp_path / "copy"))


def replayed(capsys, folder, step, *options):
    """The JSON of a replay that agrees."""
    capsys.readouterr()
    assert replay([str(folder), "--step", str(step), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, folder, step):
    """The JSON of a replay that differs, and its error."""
    capsys.readouterr()
    with pytest.raises(TrainingFailedError) as raised:
        replay([str(folder), "--step", str(step), "--json"])
    return json.loads(capsys.readouterr().out), str(raised.value)


def content(folder):
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A run of 4 steps, extended to 8 and then to 12, of which hardly anything is logged."""
    folder = tmp_path_factory.mktemp("runs") / "extended"
    sections = {**PLAIN, "log": {"interval": 100}, "schedule": {"name": "cosine"}}
    for steps in (4, 8, 12):
        train = {"steps": steps, "eval_interval": None}
        fit(
            folder, sections={**sections, "train": train}, resume="auto" if steps == 4 else "extend"
        )
    return folder


@pytest.mark.parametrize("step", [2, 6, 10])
def test_a_step_of_an_extended_run_has_the_schedule_that_it_was_made_by(capsys, extended, step):
    found = replayed(capsys, extended, step)
    assert (found["equal"], found["verdict"]) == ("bits", "batch")
    assert found["weights"]["step"] == 4 * (1 + step // 4)


def test_a_schedule_that_nothing_tells_any_more_is_not_guessed(capsys, extended, tmp_path):
    import shutil

    folder = copied(extended, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    with pytest.raises(ConfigError, match=r"step 1 .* schedule .* replaced at step 8"):
        replay([str(folder), "--step", "2"])


@pytest.mark.parametrize("step", [2, 7, 8])
def test_a_step_computed_again_is_equal_to_the_bit(capsys, trained, step):
    before = content(trained)
    found = replayed(capsys, trained, step)
    assert content(trained) == before
    assert (found["equal"], found["verdict"], found["differences"]) == ("bits", "batch", [])
    base = 4 * ((step - 1) // 4)
    assert found["steps"] == list(range(base + 1, step + 1))
    logged = {each["step"]: each for each in events(trained, "train")}
    for each in found["numbers"]:
        name = "loss" if each["name"] == "loss" else "grad_norm"
        assert each["recorded"] == each["replayed"] == logged[each["step"]][name]
    if step == 8:
        assert found["weights"]["n_tensors"] > 20
        assert found["weights"]["different"] == []
    assert len(found["rows"]) == 3
    assert found["rows"][0]["loss"] >= found["rows"][1]["loss"]


def test_the_command_at_the_end_shows_the_row_of_the_highest_loss(capsys, trained, tmp_path):
    run = copied(trained, tmp_path / "with a blank")
    highest = replayed(capsys, run, 8)["rows"][0]["row"]
    assert main(["replay", str(run), "--step=8"]) == 0
    command, _, rest = capsys.readouterr().out.splitlines()[-1].partition(" shows")
    assert rest == " the first of them"
    assert main(shlex.split(command)[1:]) == 0
    assert f"\nrow {highest} · " in capsys.readouterr().out


def changed_loss(folder, step, by):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for each in records:
        if each["event"] == "train" and each["step"] == step:
            each["loss"] += by
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))


def test_what_must_be_equal_to_the_bit_and_is_not_is_the_hardware(capsys, trained, tmp_path):
    folder = copied(trained, tmp_path)
    changed_loss(folder, 6, 1e-7)
    found, error = refused(capsys, folder, 7)
    assert found["verdict"] == "hardware"
    assert "hardware: from step 6 on: " in error
    assert "a second replay gave what the first did" in error


def test_other_versions_are_the_code_and_rounding_is_no_difference(capsys, trained, tmp_path):
    folder = copied(trained, tmp_path)
    environment = json.loads((folder / "environment.json").read_text())
    environment["versions"]["torch"] = "1.0"
    (folder / "environment.json").write_text(json.dumps(environment))
    changed_loss(folder, 6, 1e-7)
    found = replayed(capsys, folder, 7)
    assert (found["equal"], found["verdict"]) == ("rounding", "batch")
    changed_loss(folder, 6, 1e-2)
    found, error = refused(capsys, folder, 7)
    assert found["verdict"] == "code"
    assert f"torch: 1.0 → {torch.__version__}" in error


@pytest.mark.parametrize("kind", ["train", "skip", "rollback"])
@pytest.mark.parametrize(
    "values", ["", ', "step": null', ', "step": NaN', ', "step": 3, "to_step": 7']
)
def test_what_is_no_event_of_a_step_is_passed_over(trained, tmp_path, kind, values):
    folder = copied(trained, tmp_path)
    before = read_record(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"event": "{kind}"{values}}}\n')
    after = read_record(folder)
    assert after.rollbacks == {}
    assert after.numbers.keys() == before.numbers.keys()
    assert after.route(7) == before.route(7)


class StopsAt6:
    def on_step(self, trainer, step):
        if step.step == 6:
            trainer.stop("for a while")


def test_steps_of_several_starts_are_the_bits_of_none(capsys, tmp_path):
    """Step 5 and 6 were made in other micro-batches than step 7, and no checkpoint is between."""
    import shutil

    train = {"steps": 8, "eval_interval": None}
    for rows, hooks in ((4, [StopsAt6()]), (1, [])):
        sections = {**PLAIN, "train": {**train, "micro_batch_size": rows}}
        fit(tmp_path / "run", sections=sections, hooks=hooks)
    found = replayed(capsys, tmp_path / "run", 7)
    assert (found["from_step"], found["equal"]) == (6, "bits")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    found = replayed(capsys, tmp_path / "run", 7)
    assert (found["from_step"], found["equal"], found["verdict"]) == (4, "rounding", "batch")


@pytest.mark.parametrize(
    "start", [{"layout": "data=1"}, {"layout": 5, "micro_batch_size": 4, "precision": 7}]
)
def test_what_environment_json_does_not_say_is_taken_from_the_plan(trained, tmp_path, start):
    folder = copied(trained, tmp_path)
    (folder / "environment.json").write_text(json.dumps(start))
    record = read_record(folder)
    config = record.config_on(7, None)
    assert config.train.micro_batch_size == record.plan["batch"]["micro_batch_size"]
    assert make_layout(config.parallel).world_size == 1
    assert config.train.precision == "fp32"


def test_a_step_without_a_record_is_compared_with_the_next_that_has_one(capsys, tmp_path):
    fit(tmp_path / "run", sections={**PLAIN, "log": {"interval": 5}})
    found = replayed(capsys, tmp_path / "run", 7)
    assert found["steps"] == [5, 6, 7, 8]
    assert found["weights"]["step"] == 8


def test_a_skip_that_is_not_reproduced_is_the_hardware(capsys, tmp_path):
    guard = {"rollback_interval": 4, "skips": 1}
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, bad_losses={9, 10}, bad_gradients=set())  # steps 10 and 11, then a rollback
        fit(tmp_path / "run", sections={**PLAIN, "guard": guard, "train": {"steps": 14}})
    assert [(e["step"], e["to_step"]) for e in events(tmp_path / "run", "rollback")] == [(11, 8)]
    found, error = refused(capsys, tmp_path / "run", 10)
    assert found["verdict"] == "hardware"
    assert found["undone_by"] == 11
    assert found["skipped"].startswith("loss is nan")
    assert "from step 10 on" in error
    # What follows the rollback begins with the weights of step 8.
    after = replayed(capsys, tmp_path / "run", 12)
    assert (after["from_step"], after["steps"], after["equal"]) == (8, [12], "bits")


def test_damage_and_missing_steps_are_told(capsys, trained, tmp_path):
    folder = copied(trained, tmp_path)
    with pytest.raises(ConfigError, match=r"--step 13 is no step of this run"):
        replay([str(folder), "--step", "13"])
    for step in (4, 8):
        file = next((folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        if step == 8:
            break
        with pytest.raises(CorruptError, match=r"step-00000004"):
            replay([str(folder), "--step", "7"])
    with pytest.raises(CorruptError, match=r"step-0000000"):
        replay([str(folder), "--step", "9"])


def test_a_run_of_the_users_code_is_refused(tmp_path):
    adam = {"optimizer": lambda groups: torch.optim.Adam(groups, lr=1e-2)}
    fit(tmp_path / "run", sections=PLAIN, **adam)
    for step in (3, 7):  # from the initial weights, and from a checkpoint
        with pytest.raises(ConfigError, match="optimizer was "):
            replay([str(tmp_path / "run"), "--step", str(step)])


def test_changed_data_is_refused(trained, tmp_path):
    folder = copied(trained, tmp_path)
    plan = json.loads((folder / "plan.json").read_text())
    plan["data"]["hash"] = "0" * 64
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(CorruptError, match="are not those of the run"):
        replay([str(folder), "--step", "7"])


def test_the_way_to_a_step_passes_over_what_rollbacks_have_undone(trained):
    record = replace(
        read_record(trained),
        numbers={step: StepNumbers(2.0, 1.0) for step in range(1, 31)},
        rollbacks={14: 10, 21: 8},
        checkpoints=(4, 12, 24),
    )
    assert record.route(9) == Route(4, (5, 6, 7, 8, 9))
    assert record.route(13) == Route(12, (13,))  # itself undone
    assert record.route(16) == Route(4, (5, 6, 7, 8, 9, 10, 15, 16))
    assert record.route(23) == Route(4, (5, 6, 7, 8, 22, 23))
    assert [record.undone_by(step) for step in (10, 11, 14, 15)] == [21, 14, 14, 21]
    without = record.without(4, CorruptError("it is damaged"))
    with pytest.raises(CorruptError, match="it is damaged"):
        without.route(9)
    begun = replace(record, begins_with="the weights of elsewhere", checkpoints=(12, 24))
    with pytest.raises(ConfigError, match="no checkpoint before it is left"):
        RunRecord.route(begun, 9)


def test_a_checkpoint_at_step_0_is_one(trained, tmp_path, capsys):
    model, run = trained / "checkpoints" / "step-00000012", tmp_path / "tuned"
    chosen = {
        "checkpoint": {"interval": 6, "keep_last": 9, "keep_best": True},
        "train": {"eval_interval": 12},
        "model": {"qkv_bias": True},
    }
    fit(run, sections=chosen, init_from=model)
    saved = [event["step"] for event in events(run, "checkpoint")]
    assert saved == [0, 6, 12]
    assert read_record(run).checkpoints == (0, 6, 12)
    assert replayed(capsys, run, 1)["from_step"] == 0
    with pytest.raises(CorruptError, match="it is damaged"):
        read_record(run).without(0, CorruptError("it is damaged")).route(1)


def test_a_run_that_gives_up_after_step_0_says_what_there_is(trained, tmp_path, monkeypatch):
    model, run = trained / "checkpoints" / "step-00000012", tmp_path / "tuned"
    chosen = {
        "checkpoint": {"keep_best": True, "interval": 100},
        "train": {"eval_interval": 100},
        "model": {"qkv_bias": True},
    }
    spoil(monkeypatch, set(range(12)), set())
    with pytest.raises(TrainingFailedError, match="the last checkpoint is step 0"):
        fit(run, sections=chosen, init_from=model)
    with pytest.raises(TrainingFailedError, match="there is no checkpoint, so the same command"):
        fit(tmp_path / "new", sections=chosen)
