"""The programs in examples/ run, and do what they say, on a small configuration."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = [
    "--model.n-layers=1",
    "--model.d-model=32",
    "--model.context-length=32",
    "--train.batch-size=4",
    "--train.eval-interval=60",
    "--train.precision=fp32",
    "--train.compile=false",
    "--data.grammar.n-characters=20000",
]


def run_hooks(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "hooks.py", *TINY, *arguments],
        cwd=folder, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hooks_measure_schedule_and_stop(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # One hidden state and 16 letters: ln 16 = 2.77 nats at first, 1.65 for who knows the letters.
    said = run_hooks(tmp_path, "--data.grammar.n-states=1", "--train.steps=120")
    lines = (tmp_path / "runs" / "grammar" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    rates = {e["step"]: e["learning_rate"] for e in events if e["event"] == "train"}
    assert rates[1] == pytest.approx(3e-3 / 25)
    assert rates[50] == pytest.approx(3e-3 * (25 / 50) ** 0.5)
    norms = [(e["step"], e["value"]) for e in events if e["event"] == "weight_norm"]
    assert norms[0][0] == 50
    assert norms[0][1] > 1
    assert "ended after step 60: validation loss " in said
    assert events[-1]["reason"].endswith("is below 2.1")
    assert (tmp_path / "runs" / "grammar" / "checkpoints" / "step-00000060").is_dir()


def test_the_documentation_shows_the_example_as_it_is():
    page = (EXAMPLES.parent / "docs" / "python-api.md").read_text()
    code = (EXAMPLES / "hooks.py").read_text().split('"""\n\n', 1)[1]
    assert f"```python\n{code}```" in page
