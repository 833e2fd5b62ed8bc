"""`train --time`: durations, what is chosen, the same command line again, an end that moves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pentameter.checkpoint.gguf.architectures import choose_architecture
from pentameter.checkpoint.hugging_face.config_json import choose_family
from pentameter.cli.main import main
from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError
from pentameter.train.timed import choosing, time_budget
from pentameter.train.timed.size_law import gated_width
from pentameter.train.timed.time_budget import parse_time
from pentameter.train.timed.time_kept import MovedEnd, TimeKept
from pentameter.train.timed.trial import Pace

TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 60
TINY = [
    "--model.n-layers=1",
    "--model.d-model=16",
    "--model.context-length=16",
    "--train.batch-size=4",
    "--train.precision=fp32",
    "--train.compile=false",
    "--log.interval=1000",
]
ONE_STEP = Pace(2.0, 0.05, 1.0, 1e9, compiled=False)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, short_measurement) -> Path:
    """A folder with a text, in which the commands run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "novel.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    # The tests' process has been running for long.
    monkeypatch.setattr(time_budget, "seconds_running", lambda: 0.0)
    return tmp_path


@pytest.fixture
def trials(monkeypatch) -> list[object]:
    """The configurations that were tried; each trial finds ONE_STEP."""
    tried: list[object] = []

    def measure(config, dataset, seconds):
        tried.append(config)
        return ONE_STEP

    monkeypatch.setattr(time_budget, "CLOSING_SECONDS", 0.0)
    monkeypatch.setattr(choosing, "measure_pace", measure)
    return tried


def chosen(capsys, *arguments: str):
    """The configuration that `train` prints."""
    assert main(["train", *arguments, "--print-config"]) == 0
    Path("printed.toml").write_text(capsys.readouterr().out)
    return load_config("printed.toml")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("1H1s", 3601)]
)
def test_durations(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30", "m", "0s", "-5m", "1.5h", "30m1h", "5 minutes", "9999999h", "9" * 5000 + "h"]
)
def test_what_is_no_duration(text):
    with pytest.raises(ConfigError, match="--time"):
        parse_time(text)


def test_a_text_gets_model_and_length(capsys, trials):
    config = chosen(capsys, "novel.txt", "--time", "10m")
    assert config.optimizer.name == "muon"
    assert config.model.positions == "rotary"
    steps, schedule = config.train.steps, config.schedule
    assert 0.8 * 600 < steps * ONE_STEP.step_seconds < 600
    assert schedule.name == "wsd"
    assert schedule.cooldown_steps == round(0.4 * steps)
    assert schedule.decay_steps is None  # with the run's end
    assert config.train.compile is False  # as it was measured
    assert trials


def test_what_a_text_gets_is_a_model_that_other_programs_open(capsys, trials):
    config = chosen(capsys, "novel.txt", "--time", "10m")
    model = config.model.model_copy(update={"vocab_size": 300})
    assert choose_family(model) == "qwen3"
    assert choose_architecture(model).architecture == "qwen3"
    assert model.feed_forward.width == gated_width(model.d_model)
    other = chosen(capsys, "novel.txt", "--time", "10m", "--model.feed-forward.activation=relu2")
    assert other.model.feed_forward.width is None  # two matrices, four times as wide


def test_the_users_settings_stay(capsys, trials):
    given = ["--model.d-model=48", "--optimizer.name=adamw", "--data.tokenizer=char"]
    config = chosen(capsys, "quickstart", "--time=10m", "--data.path=novel.txt", *given)
    assert (config.model.d_model, config.optimizer.name) == (48, "adamw")
    assert 48 % config.model.attention.n_heads == 0
    assert config.data.tokenizer == "char"


def test_another_preset_keeps_its_recipe(capsys, trials):
    given = ["--data.path=novel.txt", "--model.attention.n-heads=2", *TINY]
    config = chosen(capsys, "shakespeare-char", "--time=10m", *given)
    whole = load_config("shakespeare-char", given)
    assert config.optimizer == whole.optimizer
    assert config.model == whole.model
    assert config.schedule.name == whole.schedule.name
    assert config.train.steps != whole.train.steps
    assert len(trials) == 1


def test_reasons_are_three_lines(capsys, trials):
    main(["train", "novel.txt", "--time=10m", "--print-config"])
    said = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("pentameter: ")
    ]
    assert [line.split()[1] for line in said] == ["--time", "text", "model", "length"]
    assert "the text is read" in said[0]  # before it is: that may take minutes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--time=1s"], "--time 1 s is too short: .* ask for"),
        (["--time=5m", "--train.steps=9"], "--train.steps and --time both say how long"),
        (["--time=5m", "--nproc=2"], "--time measures the steps of one process"),
        (["--time=5m", "--sweep", "seed=1,2"], "--sweep and --time exclude each other"),
        (["--time=5m", "--layout=best"], "--layout and --time exclude each other"),
        (["--time=5m", "--resume=extend"], "--resume extend"),
    ],
)
def test_what_is_refused(capsys, trials, arguments, said):
    assert main(["train", "novel.txt", *arguments]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_the_same_command_line_continues_the_same_run(folder, capsys, monkeypatch, trials):
    monkeypatch.setattr(TimeKept, "_moved_end", lambda *_: None)
    command = ["train", "novel.txt", "--time=60s", *TINY]
    assert main(command) == 0
    assert "asked 1 min 0 s, took" in capsys.readouterr().out
    run = folder / "runs" / "novel"
    before = (run / "config.toml").read_text()
    monkeypatch.setattr(choosing, "measure_pace", None)  # a second choice would fail
    assert main(command) == 0
    longer = "was complete already. To train longer, give more than --time 60s."
    assert longer in capsys.readouterr().out
    assert (run / "config.toml").read_text() == before
    assert main(["train", str(run / "config.toml"), f"--run-dir={run}"]) == 0
    for other in (["--time=59s"], ["--time=60s", "--seed=3"], ["--time=2m", "--seed=3"]):
        assert main(["train", "novel.txt", *TINY, *other]) == 2
        assert "holds a run of" in capsys.readouterr().err


def test_a_run_without_a_time_is_not_taken_for_one(folder, capsys, trials):
    assert (
        main(["train", "novel.txt", "--train.steps=2", "--train.sample-interval=none", *TINY]) == 0
    )
    capsys.readouterr()
    assert main(["train", "novel.txt", "--time=5m", *TINY]) == 2
    assert "begun without --time" in capsys.readouterr().err


def test_an_end_that_moves_is_the_configurations(folder, capsys, monkeypatch, trials):
    """The run stops before it cools down, and goes on to the other end: as one that had this length
    from the start."""

    def moved_end(self, run, step):
        return MovedEnd(step + 4, 4) if step == 6 else None

    monkeypatch.setattr(TimeKept, "_moved_end", moved_end)
    given = [*TINY, "--train.eval-interval=none", "--train.sample-interval=none"]
    assert main(["train", "novel.txt", "--time=60s", *given]) == 0
    said = capsys.readouterr().out
    assert "the machine is slower than measured, so the run is to have 10 steps" in said
    assert "ended at step 10: completed" in said
    run = folder / "runs" / "novel"
    config = load_config(run / "config.toml")
    assert (config.train.steps, config.schedule.cooldown_steps) == (10, 4)
    assert json.loads((run / "time.json").read_text())["chosen"]["train.steps"] == 10
    assert main(["train", str(run / "config.toml"), "--run-dir=again"]) == 0
    assert losses(folder / "again") == losses(run)


def losses(run: Path) -> list[float]:
    """The losses of a run's logged steps but the one at which it stopped, which only it logs."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [each["loss"] for each in lines if each["event"] == "train" and each["step"] != 6]
