"""`pentameter verify` as programs and people meet it."""

from __future__ import annotations

import json
import math
import shlex

import pytest

from pentameter.cli import verify as command
from pentameter.config.files.load import load_config
from pentameter.data.sizes import data_sizes
from pentameter.errors import ConfigError
from pentameter.estimating.search.search import search
from pentameter.estimating.seconds.cluster import parse_cluster
from pentameter.planning.layouts.layout import Layout
from pentameter.verify import workers as processes
from pentameter.verify.cases import Case, chosen_cases, fastest_cases
from pentameter.verify.compare import Difference, Outcome

KEYS = {
    "layout",
    "world_size",
    "loss_error",
    "gradient_error",
    "parameter_error",
    "worst_tensor",
    "passed",
    "seconds",
}


@pytest.fixture
def run(standing_workers, monkeypatch):
    """The verb, with the workers that are there already."""
    monkeypatch.setattr(processes, "Workers", standing_workers)
    return command.run


def test_json_is_all_of_stdout(run, capsys):
    layouts = "data=2;tensor=2,tied_head=false"
    assert run(["quickstart", "--layouts", layouts, "--steps", "1", "--json"]) == 0
    said = capsys.readouterr()
    printed = json.loads(said.out)
    assert printed["passed"] is True
    assert [each["layout"] for each in printed["layouts"]] == layouts.split(";")
    for each in printed["layouts"]:
        assert each.keys() >= KEYS
        assert each["world_size"] == 2
        assert 0 <= each["gradient_error"] <= 1e-10
    assert "1/2 data 2: equal" in said.err


def test_people_see_a_table_and_what_was_shrunk(run, capsys):
    layouts = ["--layouts", "data=1,micro_batches=4", "--steps", "1"]
    assert run(["quickstart", *layouts, "--model.bias", "true"]) == 0
    said = capsys.readouterr().out
    assert "n_layers 4 → 5" in said
    assert "✓  one process, 4 micro-batches" in said
    assert "1 of 1 layouts equal one process: every loss, gradient and weight" in said


def test_a_difference_ends_with_70_and_says_how_to_see_it_again(run, capsys, monkeypatch):
    wrong = Difference("gradient", "head.weight", 2, 1, math.inf)
    bad = Outcome(Case(Layout(data=2)), 1.0, 0.0, math.inf, 0.0, worst=wrong, first=wrong)
    crashed = Outcome(Case(Layout(tensor=2)), 1.0, failure="rank 0: ValueError: no")
    monkeypatch.setattr(
        "pentameter.verify.compare.verify_layouts", lambda *_, **__: iter([bad, crashed])
    )
    arguments = ["quickstart", "--layouts", "data=2;tensor=2", "--train.batch-size", "8"]
    assert run(arguments) == 70
    said = capsys.readouterr().out
    assert "✗ data 2: the gradient of head.weight is off by inf (step 2, rank 1)" in said
    assert "✗ tensor 2: rank 0: ValueError: no" in said
    assert "0 of 2 layouts equal one process" in said
    again = next(line for line in said.splitlines() if "alone:" in line)
    repeated = shlex.split(again)
    assert repeated[1:4] == ["pentameter", "verify", "quickstart"]
    assert repeated[-1] == "data=2"
    assert "--train.batch-size" in repeated

    assert run([*arguments, "--json"]) == 70
    printed = json.loads(capsys.readouterr().out)
    assert printed["passed"] is False
    assert [each["passed"] for each in printed["layouts"]] == [False, False]
    assert printed["layouts"][0]["worst_tensor"] == "head.weight"
    assert printed["layouts"][0]["gradient_error"] is None
    assert printed["layouts"][1]["problem"] == "rank 0: ValueError: no"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["quickstart", "--layouts", "pipelines=2"], "'pipelines=2' must be NAME=VALUE"),
        (["quickstart", "--steps", "0"], "--steps 0 must be in 1"),
        (["quickstart", "--model.n-headz", "3"], "model.attention.n_heads"),
        (["quickstar"], "did you mean"),
    ],
)
def test_wrong_usage(arguments, said):
    with pytest.raises(ConfigError, match=said):
        command.run(arguments)


def test_one_of_several_processes_is_refused(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="start it once, alone"):
        command.run(["quickstart"])


def test_a_case_that_no_run_could_have_is_wrong_usage(capsys):
    with pytest.raises(ConfigError, match=r"layout 'pipeline=2,micro_batches=1': .*raise|lower"):
        command.run(["grammar", "--layouts", "pipeline=2,micro_batches=1"])
    with pytest.raises(ConfigError, match=r"kv_heads; did you mean tensor\?"):
        command.run(["grammar", "--layouts", "tenser=2"])


def test_the_layouts_of_a_search_are_verified():
    config = load_config("smollm2-135m")
    cases = fastest_cases(config, "h100-80gb:4x1", data_sizes(config))
    assert chosen_cases(config, ";".join(map(str, cases))) == cases  # as `--layouts` takes them
    assert len(cases) == len(set(cases)) > 1
    assert {case.layout.world_size for case in cases} == {4}
    found = search(config, parse_cluster("h100-80gb:4x1"))
    assert [case.layout for case in cases] == [each.plan.layout for each in found.estimates]


def test_a_cluster_that_is_too_small_is_wrong_usage():
    with pytest.raises(ConfigError, match="no layout of llama3-70b fits there"):
        command.run(["llama3-70b", "--layouts", "best:h100-80gb:1x1"])
