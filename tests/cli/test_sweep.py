"""`train --sweep`: what it trains, compares and refuses."""

from __future__ import annotations

import pytest

from pentameter.autotune import sweep
from pentameter.cli.main import main
from pentameter.cli.train import swept_values
from pentameter.errors import ConfigError, InterruptedRunError


def test_values_between_commas_and_between_semicolons():
    assert swept_values(
        ["optimizer.learning-rate=1e-3, 2e-3", "--optimizer.betas=0.9,0.95;0.9,0.99"]
    ) == {
        "optimizer.learning_rate": ["1e-3", "2e-3"],
        "optimizer.betas": ["0.9,0.95", "0.9,0.99"],
    }


@pytest.mark.parametrize(
    ("swept", "said"),
    [
        (["seed"], "must read KEY=VALUE,VALUE"),
        (["seed=1,,2"], "must read KEY=VALUE,VALUE"),
        (["seed=1", "seed=2"], "names seed twice"),
    ],
)
def test_what_is_no_sweep(swept, said):
    with pytest.raises(ConfigError, match=said):
        swept_values(swept)


TINY = [
    "train", "grammar", "--data.grammar.n-characters=3000", "--model.n-layers=1",
    "--model.d-model=16", "--model.context-length=16", "--train.batch-size=4", "--train.steps=4",
    "--train.eval-interval=2", "--train.precision=fp32", "--train.compile=false",
    "--train.sample-interval=none",
]  # fmt: skip


def read(folder, name):
    return {path.parent.name: path.read_text() for path in folder.glob(f"*/{name}")}


def test_a_sweep_trains_compares_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = [*TINY, "--sweep", "optimizer.learning_rate=1e-3,2e-3", "--sweep=seed=1"]
    assert main([*command, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("runs/grammar-sweep/learning_rate-") == 2
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 runs in runs/grammar-sweep\n1/2  learning_rate-1e-3_seed-1  val loss")
    assert "best validation loss" in said
    folder = tmp_path / "runs" / "grammar-sweep"
    assert (folder / "compare.html").is_file()
    assert (
        'name = "learning_rate-2e-3_seed-1"'
        in read(folder, "config.toml")["learning_rate-2e-3_seed-1"]
    )
    assert len(read(folder, "report.html")) == 2
    metrics = read(folder, "metrics.jsonl")
    assert main(command) == 0  # which finds both complete
    for label, text in read(folder, "metrics.jsonl").items():
        assert text.count('"event": "train"') == metrics[label].count('"event": "train"')


def test_a_sweep_that_is_stopped_says_so_whatever_its_runs_left(tmp_path, monkeypatch, capsys):
    def stopped(self, number):
        for run in self._waiting:  # the last was being set up
            run.folder.mkdir()
            (run.folder / "plan.json").touch()
        for run in list(self._waiting)[:2]:
            (run.folder / "config.toml").touch()
        self.stopped_by = "SIGINT"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep._Sweep, "work", stopped)
    assert main([*TINY, "--sweep", "seed=1,2,3"]) == InterruptedRunError.exit_code
    assert "the sweep was stopped by SIGINT" in capsys.readouterr().err
    assert (tmp_path / "runs" / "grammar-sweep" / "compare.html").is_file()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sweep", "model.attention.n_heads=2,3"], "n_heads=3 must divide"),
        (["--sweep", "seed=1", "--at-once", "0"], "--at-once 0"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_run(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, *options]) == ConfigError.exit_code
    assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_launcher_starts_no_sweep(monkeypatch, capsys):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main([*TINY, "--sweep", "seed=1,2"]) == ConfigError.exit_code
    assert "leave the launcher out" in capsys.readouterr().err
