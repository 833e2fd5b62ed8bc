"""Runs on several nodes go on after any fault, and give what an undisturbed run gives.

`tests/processes/launch/test_node_launch.py` has the launchers' part of it in the quick tier;
`python -m trials.nodes` makes many trials.
"""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from pentameter import __main__ as pentameter_main
from pentameter.cli import train
from pentameter.cli.options.arguments import parse
from pentameter.config.files.load import load_config
from pentameter.record.reading import read_run
from pentameter.report.pages.page import render_page
from trials.nodes import noting
from trials.nodes import trial as trials
from trials.nodes.half_lost import lose_half
from trials.nodes.network import reason_not_to
from trials.nodes.trial import TRIALS, Trial, failure_bound, table


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "node_off" else pytest.param(kind, marks=pytest.mark.slow) for kind in TRIALS],
)
def test_a_run_on_three_nodes_survives(kind, tmp_path):
    if (reason := reason_not_to()) is not None:
        pytest.skip(reason)
    trial = TRIALS[kind](7, tmp_path)
    assert not trial.problem, trial


def test_what_a_table_says_of_its_trials():
    """The bounds are those of the rule of three, and of a textbook's table."""
    assert failure_bound(300, 0) == pytest.approx(3 / 300, rel=0.01)
    assert failure_bound(20, 2) == pytest.approx(0.2826, abs=1e-4)
    assert table([]).splitlines()[-1] == "| all | 0 | 0 | 100% | – | – |"


@pytest.mark.slow
def test_the_report_of_a_run_that_lost_half_of_its_nodes(tmp_path):
    if (reason := reason_not_to()) is not None:
        pytest.skip(reason)
    record = read_run(lose_half(tmp_path, seconds=2.0))
    n_nodes = [each.n_nodes for each in record.sessions]  # on a busy machine not all come at once
    assert 2 in n_nodes[n_nodes.index(4) :]
    assert n_nodes[-1] == 4
    assert ", 2 from step" in render_page(record)


def test_a_batch_that_differs_is_a_problem_of_its_trial(tmp_path, monkeypatch):
    curve = dict.fromkeys(range(1, 7), 2.0)
    monkeypatch.setattr(trials, "reference", lambda last, folder: curve)

    def note(run: str, process: int, *batches: tuple[int, dict[int, str]]) -> None:
        (tmp_path / f"{run}-batches").mkdir(exist_ok=True)
        lines = [json.dumps({"step": step, "rows": rows}) for step, rows in batches]
        text = "\n".join([*lines, '{"step": 3, "ro'])  # killed while it wrote
        (tmp_path / f"{run}-batches" / f"{process}.jsonl").write_text(text)

    def problems() -> list[str]:
        made = [Trial("node_off", step=2), Trial("link_cut", step=4)]
        trials._judge(made, curve, tmp_path)
        return [trial.problem for trial in made]

    whole = {0: "a", 1: "b"}
    note("reference", 1, *((step, whole) for step in curve))
    note("run", 1, *((step, {0: "a"}) for step in curve))
    assert problems() == ["the batch of step 3 differs", "the batch of step 5 differs"]
    note("run", 2, *((step, {1: "b"}) for step in curve))
    assert problems() == ["", ""]
    note("run", 3, (6, {1: "c"}))  # by a process whose step was made again
    assert problems() == ["", "the batch of step 6 differs"]


def test_ranks_of_several_nodes_note_their_batches(tmp_path, monkeypatch):
    """What trials run in place of `pentameter train` follows the launcher of today."""
    chosen = []
    monkeypatch.setattr(sys, "argv", ["noting", "train", "grammar", "--nodes", "2"])
    monkeypatch.setattr(train, "AS_RANK", train.AS_RANK)
    monkeypatch.setattr(pentameter_main, "main", lambda: chosen.append(train.AS_RANK))
    noting.main()
    (function,) = chosen
    module, _, name = function.partition(":")
    assert getattr(importlib.import_module(module), name) is noting.train_as_rank
    options = parse(train.TrainArguments, ["grammar", "--nodes", "2"], verb="train")
    launch = train._launch(load_config("grammar"), options, ["grammar", "--nodes", "2"])
    assert launch.program._function == function
