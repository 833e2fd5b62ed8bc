"""A training goes on when its console goes away: its log has all that was said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TINY = [
    "grammar", "--data.grammar.n-characters=3000", "--model.n-layers=1", "--model.d-model=16",
    "--model.context-length=16", "--train.batch-size=4", "--train.steps=4", "--log.interval=1",
    "--train.eval-interval=4", "--train.precision=fp32", "--train.compile=false",
    "--train.sample-interval=4", "--run-dir=run",
]  # fmt: skip


def train(tmp_path, streams, *options):
    """Train 4 steps with a shell's redirections `streams`, and return how the command ended."""
    command = '"$@" ' + streams
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}", "bash", sys.executable, "-m", "pentameter",
         "train", *TINY, *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )  # fmt: skip


def assert_trained(tmp_path, *, failure=None):
    log = (tmp_path / "run" / "log.txt").read_text()
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["event"] == "train"] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "report.html").exists()
    if failure is not None:
        assert f"warning: stdout failed ({failure}); the run goes on" in log
        assert log.splitlines()[-1] == f"warning: stdout had failed on the way: {failure}"


@pytest.mark.parametrize(
    ("streams", "failure"),
    [
        ("| head -n 2", "Broken pipe"),
        pytest.param(">/dev/full", "No space left on device", marks=pytest.mark.skipif(
            not Path("/dev/full").exists(), reason="/dev/full is Linux's")),
    ],
)  # fmt: skip
def test_a_training_whose_stdout_fails_goes_on_and_says_so(tmp_path, streams, failure):
    ended = train(tmp_path, streams)
    assert ended.returncode == 0, ended.stderr
    told = f"pentameter: warning: stdout failed ({failure}); the run goes on, and its log"
    assert ended.stderr.count(told) == 1
    assert "run/log.txt has all lines" in ended.stderr
    assert_trained(tmp_path, failure=failure)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "failure"),
    [("2>&1 | head -n 2", "Broken pipe"), ("<&- >&- 2>&-", None), (">/dev/full 2>&1", None)],
)
def test_a_training_without_any_stream_goes_on(tmp_path, streams, failure):
    ended = train(tmp_path, streams)
    assert ended.returncode == 0
    assert_trained(tmp_path, failure=failure)


@pytest.mark.slow
def test_ranks_go_on_without_the_console_of_the_first(tmp_path):
    ended = train(tmp_path, "2>&1 | head -n 2", "--nproc=2")
    assert ended.returncode == 0
    assert_trained(tmp_path, failure="Broken pipe")


@pytest.mark.parametrize("streams", ["2>&-", ">&- 2>&-", "2>/dev/full"])
def test_an_error_that_nobody_can_read_keeps_its_exit_code(tmp_path, streams):
    ended = train(tmp_path, streams, "--train.steps=-1")
    assert ended.returncode == 2


def test_what_is_asked_for_and_cannot_be_printed_is_a_failure(tmp_path):
    for asked in (["--help"], ["--print-config"]):
        ended = train(tmp_path, ">/dev/full", *asked)
        reading = "pentameter: reading grammar …\n" if asked == ["--print-config"] else ""
        said = f"{reading}pentameter: stdout: No space left on device\n"
        assert (ended.returncode, ended.stderr) == (74, said)
