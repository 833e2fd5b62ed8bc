"""The first line of each verb comes before torch is imported, on stderr, and from one process."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pentameter.cli.main import VERBS, module_of
from pentameter.cli.options.arguments import FIRST_LINES, begin, first_line, parse
from pentameter.cli.sample import SampleArguments

ANSWERS_AT_ONCE = {"completion"}

LINES = {
    "train": (["quickstart"], "reading quickstart …"),
    "sample": (["runs/x"], "reading the model runs/x …"),
    "serve": (["runs/x", "runs/y"], "reading the model runs/x, runs/y …"),
    "eval": (["runs/x"], "reading the model runs/x …"),
    "prepare": (["nowhere.txt", "--out", "x"], "reading nowhere.txt …"),
    "export": (["runs/x", "--to", "hf", "--out", "x"], "reading the model runs/x …"),
    "import": (["theirs", "--out", "x"], "reading the model theirs …"),
    "plan": (["gpt2-124m", "--json"], "reading gpt2-124m …"),
    "verify": (["nowhere.toml"], "reading nowhere.toml …"),
    "data": (["runs/x", "--step", "3"], "reading step 3 of runs/x …"),
    "replay": (["runs/x", "--step", "3"], "reading step 3 of runs/x …"),
    "report": (["runs/x"], "reading the run runs/x …"),
    "compare": (["a", "b", "c", "d", "e"], "reading the runs a, b, c and 2 more …"),
    "watch": (["nowhere"], "reading the runs in nowhere …"),
    "doctor": (["--json"], "looking at this machine …"),
}

RECORDED = """
import contextlib, io, json, sys
from pentameter.cli.main import module_of

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            report(printed.getvalue())
            raise KeyboardInterrupt  # which nothing takes for a missing package

def report(on_stdout):
    print(json.dumps([verb, said.getvalue().splitlines()[:1], on_stdout]), file=out)

sys.meta_path.insert(0, NoTorch())
out = sys.stdout
for verb, arguments in json.loads(sys.argv[1]).items():
    said, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        with contextlib.suppress(Exception, KeyboardInterrupt):
            module_of(verb).run(arguments)
    report("")
"""


def test_it_comes_before_torch_is_imported_and_not_on_stdout(tmp_path):
    asked = {verb: arguments for verb, (arguments, _) in LINES.items()}
    done = subprocess.run(
        [sys.executable, "-c", RECORDED, json.dumps(asked)],
        capture_output=True, text=True, check=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert {verb for verb, _, _ in seen} == LINES.keys()
    for verb, said, printed in seen:
        assert said == [f"pentameter: {LINES[verb][1]}"]
        assert printed == ""


def test_every_verb_has_one_but_those_that_answer_at_once():
    assert FIRST_LINES.keys() == LINES.keys() == VERBS.keys() - ANSWERS_AT_ONCE


def test_where_torch_is_there_already_nothing_is_said(capsys):
    importlib.import_module("torch")
    parse(SampleArguments, ["runs/x"], verb="sample")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("environment", "speaks"),
    [
        ({}, True),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "PENTAMETER_LAUNCH_FOLDER": "x"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, False),
    ],
)
def test_one_process_says_it(monkeypatch, capsys, environment, speaks):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # else the environment is changed
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1234")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    begin("sample", SampleArguments("runs/x"))
    assert capsys.readouterr().err == "pentameter: reading the model runs/x …\n" * speaks


def test_nothing_named_is_nothing_read():
    asked = module_of("serve").ServeArguments(())
    assert first_line("serve", asked) is None


def test_a_training_without_a_source_reads_the_model_it_begins_with():
    asked = module_of("train").TrainArguments(None, init_from=Path("tiny"))
    assert first_line("train", asked) == "reading the model tiny …"
    assert first_line("train", module_of("train").TrainArguments(None)) is None
