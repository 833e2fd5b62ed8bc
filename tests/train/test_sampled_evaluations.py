"""A run that is evaluated on a sample of the validation split, and at its end on the whole."""

from __future__ import annotations

import json
import math

import pytest
from tiny_runs import config, events, fit, recorded

from pentameter.cli.main import main
from pentameter.config.fingerprint import config_hash
from pentameter.planning.plan import LEAST_EVALUATION_TOKENS, make_plan
from pentameter.record.reading import read_run
from pentameter.record.results import results
from pentameter.report.pages.page import render_page
from pentameter.report.watch.comparison import compare_runs

SECTIONS = {"train": {"eval_tokens": 64}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "sampled"
    trainer, _ = fit(folder, sections=SECTIONS, schedule=lambda step: 1e-2 if step < 8 else 1.0)
    return folder, trainer


def test_both_are_named_and_the_best_is_among_the_sampled(run):
    folder, trainer = run
    found = events(folder, "eval")
    sampled = [each for each in found if each["split"] == "val-sample"]
    assert [each["step"] for each in sampled] == [0, 4, 8, 12]
    assert {each["tokens"] for each in sampled} == {64}
    (whole,) = (each for each in found if each["split"] == "val")
    assert whole == found[-1]
    assert whole["tokens"] == trainer.dataset.split("val").n_tokens - 1
    best = min(sampled, key=lambda each: each["loss"])
    assert whole["step"] == best["step"] == trainer.state.best_step == 8
    assert not whole["best"]
    assert [each["step"] for each in sampled if each["best"]][-1] == 8
    assert trainer.state.best_of == "val-sample of 64"


def test_the_whole_is_what_eval_says_of_the_run(run, capsys):
    folder, _ = run
    assert main(["eval", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (whole,) = (each for each in events(folder, "eval") if each["split"] == "val")
    assert said["step"] == whole["step"]
    assert said["tokens"] == whole["tokens"]
    assert said["loss"] == pytest.approx(whole["loss"], rel=1e-6)  # float32, other batches


def test_log_and_report_name_both(run):
    folder, _ = run
    log = (folder / "log.txt").read_text()
    n_tokens = run[1].dataset.split("val").n_tokens
    assert f"64 of the {n_tokens:,} validation tokens every 4 steps" in log
    assert log.count("val-sample loss") == 4
    assert log.count("val loss") == log.count("whole split") == 1
    record = read_run(folder)
    found = results(record)
    assert record.best().split == "val-sample"
    assert found.further["loss of the whole validation split"] == record.whole_validation.loss
    page = render_page(record)
    assert "on a sample of 64 tokens" in page
    assert "whole validation split" in page


def test_losses_of_a_sample_and_of_the_whole_are_not_ranked(run, tmp_path):
    fit(tmp_path / "whole")
    compared = compare_runs([run[0], tmp_path / "whole"])
    assert "train.eval_tokens" in json.dumps(compared.to_json())
    assert not compared.ranking.is_ranked


def test_a_resumed_run_is_evaluated_as_one_that_never_stopped(run, tmp_path):
    class Stops:
        def on_step(self, run, step):
            if step.step == 6:
                run.stop("of the test")

    def rate(step):
        return 1e-2 if step < 8 else 1.0

    fit(tmp_path / "run", sections=SECTIONS, schedule=rate, hooks=[Stops()])
    fit(tmp_path / "run", sections=SECTIONS, schedule=rate)

    def sampled(folder):
        return [e for e in recorded(folder) if e["event"] == "eval" and e["split"] != "val"]

    assert sampled(tmp_path / "run") == sampled(run[0])


def test_another_sample_begins_a_best_of_its_own(tmp_path):
    first, _ = fit(tmp_path, sections={"train": {"eval_tokens": 64, "steps": 4}})
    assert first.state.best_of == "val-sample of 64"
    again, _ = fit(tmp_path, sections={"train": {"steps": 8}}, resume="extend")
    assert again.state.best_of == "val"
    assert again.state.best_step == 8
    whole = [each for each in events(tmp_path, "eval") if each["split"] == "val"]
    assert whole[-1]["best"]
    assert read_run(tmp_path).best().split == "val"


def test_more_tokens_than_there_are_is_the_whole(tmp_path):
    run, _ = fit(tmp_path, sections={"train": {"eval_tokens": 10**6, "steps": 4}})
    assert {each["split"] for each in events(tmp_path, "eval")} == {"val"}
    assert run.state.best_of == "val"


def test_auto_is_a_rule_of_the_plan():
    tiny = make_plan(config(train={"eval_tokens": "auto"}), vocab_size=30)
    assert tiny.config.train.eval_tokens == LEAST_EVALUATION_TOKENS
    large = {"eval_tokens": "auto", "steps": 1000, "eval_interval": 100, "batch_size": 4096}
    plan = make_plan(config(train=large), vocab_size=30)
    between = 100 * 4096 * 16
    # An evaluation of so many tokens takes a fiftieth: a third of a step's FLOPs a token.
    assert math.isclose(plan.config.train.eval_tokens / 3, between / 50, rel_tol=1e-5)
    never = make_plan(config(train={**large, "eval_interval": None}), vocab_size=30)
    assert never.config.train.eval_tokens is None


def test_it_does_not_define_the_run():
    assert config_hash(config(**SECTIONS)) == config_hash(config())
