"""`Trainer(…, time="10m")`: what `train --time` does, from Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import pentameter as pm
from pentameter.cli.main import main
from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError
from pentameter.train.timed.size_law import best_rate, tuning_rate
from pentameter.train.timed.time_kept import MovedEnd, TimeKept

TINY = {
    "model.n_layers": 1,
    "model.d_model": 16,
    "model.context_length": 16,
    "train.batch_size": 4,
    "train.precision": "fp32",
    "train.compile": False,
    "train.eval_interval": None,
    "train.sample_interval": None,
    "log.interval": 1000,
}
OPTIONS = [f"--{key}={'none' if value is None else value}" for key, value in TINY.items()]


pytestmark = pytest.mark.usefixtures("trials")


def chosen_by_the_command(capsys, source, *options):
    capsys.readouterr()
    assert main(["train", source, "--time=10m", *options, "--print-config"]) == 0
    with open("printed.toml", "w") as file:
        file.write(capsys.readouterr().out)
    return load_config("printed.toml")


@pytest.mark.parametrize(
    ("source", "overrides", "options", "n_lines"),
    [
        ("novel.txt", {}, [], 4),
        ("quickstart", {"data": {"path": "novel.txt"}}, ["--data.path=novel.txt"], 4),
        ("grammar", TINY, OPTIONS, 2),
    ],
)
def test_python_chooses_what_the_command_does(capsys, trials, source, overrides, options, n_lines):
    trainer = pm.Trainer(source, overrides=overrides, time="10m", run_dir="python")
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if line.startswith("pentameter: ")]) == n_lines
    assert trials
    assert trainer.config == chosen_by_the_command(capsys, source, *options)


def test_of_a_configuration_the_length_is_chosen(capsys):
    config = load_config("grammar", TINY)
    trainer = pm.Trainer(config, time="10m", quiet=True)
    assert capsys.readouterr().err == ""
    assert 0.8 * 600 < 2 * trainer.config.train.steps < 600
    assert trainer.config.model == config.model


def test_either_continues_what_the_other_began(capsys, trials, monkeypatch):
    def moved_end(self, run, step):
        return MovedEnd(step + 4, 4) if step == 6 else None

    monkeypatch.setattr(TimeKept, "_moved_end", moved_end)
    trainer = pm.Trainer("novel.txt", overrides=TINY, time="60s", quiet=True)
    end = trainer.fit()
    assert (end.step, trainer.config.train.steps) == (10, 10)
    assert trainer.run.config.schedule.cooldown_steps == 4
    record = json.loads((trainer.run_dir / "time.json").read_text())
    assert record["chosen"]["train.steps"] == 10
    n_tried = len(trials)
    assert main(["train", "novel.txt", "--time=60s", *OPTIONS]) == 0
    assert "was complete already" in capsys.readouterr().out
    assert len(trials) == n_tried


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"time": "soon"}, "is no duration"),
        ({"time": "5m", "overrides": {"train.steps": 5}}, "both say how long the run is"),
        ({"time": "5m", "resume": "extend"}, "--resume extend"),
        ({"time": "1s"}, "is too short"),
    ],
)
def test_what_is_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        pm.Trainer("novel.txt", quiet=True, **arguments)


def test_without_a_time_a_text_is_trained_on_too():
    trainer = pm.Trainer("novel.txt", overrides={**TINY, "train.steps": 2}, quiet=True)
    assert (trainer.config.data.path, trainer.fit().step) == ("novel.txt", 2)


@pytest.fixture
def base():
    """A run folder of a model of width 16, trained at a rate of 1e-2."""
    rates = {"optimizer.learning_rate": 1e-2, "schedule.min_learning_rate": 1e-6}
    tiny = {**TINY, **rates, "data.tokenizer": "char", "train.steps": 1}
    pm.Trainer("novel.txt", overrides=tiny, run_dir="base", quiet=True).fit()
    return "base"


def tuned(source="novel.txt", **changes):
    given = {"data.tokenizer": "char", "train.eval_interval": None, **changes}
    return pm.Trainer(source, overrides=given, time="10m", init_from="base", run_dir="tuned")


def test_a_model_is_tuned_at_a_rate_that_it_bears(base, capsys):
    config = tuned().config
    assert config.model.d_model == 16
    rate = config.optimizer.learning_rate
    assert rate == tuning_rate(16) == pytest.approx(0.3 * best_rate(16), rel=1e-2)
    assert config.schedule.min_learning_rate <= config.optimizer.learning_rate / 10
    assert config.schedule.warmup_steps == config.train.steps // 10
    assert (
        "rate    0.00509 at most: 0.3 of what random weights of width 16" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "changes", [{"optimizer.learning_rate": 5e-3}, {"lora.rank": 4}, {"optimizer.learning_rate": 1}]
)
def test_a_rate_of_the_users_and_that_of_adapters_stay(base, changes):
    rate = changes.get("optimizer.learning_rate", 1e-2)
    assert tuned(**changes).config.optimizer.learning_rate == rate


def test_a_lower_rate_of_the_models_stays(base):
    path = Path("base/config.toml")
    text = path.read_text()
    path.write_text(text.replace("learning_rate = 0.01\n", "learning_rate = 1e-05\n", 1))
    assert tuned().config.optimizer.learning_rate == 1e-5


def test_a_file_of_the_users_says_its_rate_itself(base):
    shutil.copy("base/config.toml", "mine.toml")
    config = tuned("mine.toml", **{"data.path": "novel.txt"}).config
    assert config.optimizer.learning_rate == 1e-2
    assert tuned("base/config.toml").config.optimizer.learning_rate == tuning_rate(16)
