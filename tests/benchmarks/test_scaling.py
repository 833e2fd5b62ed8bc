"""`benchmarks/scaling.py`: that it runs every layout and schedule, and that its figures agree."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pentameter.planning.plan import make_plan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("scaling")


@pytest.mark.slow
def test_it_runs(tmp_path):
    path = tmp_path / "result.json"
    arguments = ["--tiny", "--rounds", "1", "--patience", "0", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "scaling.py"), *arguments],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text(encoding="utf-8"))
    for part in ("data", "layouts", "four"):
        sides = result[part]["sides"]
        # the same steps on the same batches, whatever the layout
        losses = [side["loss"] for side in sides.values()]
        assert losses == pytest.approx([losses[0]] * len(losses), abs=0.01)
        assert sides["1 process"]["ratio"] == 1
        for side in sides.values():
            assert side["tokens per second"] * side["seconds"] == pytest.approx(16 * 32)
    for n_micro_batches in ("2", "4"):
        planned = {name: row["planned"] for name, row in result["bubble"][n_micro_batches].items()}
        assert planned["gpipe"] == planned["1f1b"]
        assert planned["1f1b"] > planned["interleaved"] > planned["zero-bubble, 2 stages each"]
    assert "bubble, pipeline 2, 2 micro-batches" in done.stdout


def test_its_random_tokens_make_batches(scaling):
    """Also the GPU benchmark's; both run whole in the slow tier alone."""
    plan = make_plan(scaling.character_gpt(SimpleNamespace(tiny=True), {}))
    batches = importlib.import_module("gpu_sides").random_batches(plan)
    batch = batches.batch(0)
    assert batch.inputs.shape == (16, plan.config.model.context_length)
    assert 0 <= batch.inputs.min() <= batch.inputs.max() < 65


def test_the_bubble_is_idle_time_over_computing_time(scaling):
    turns = [SimpleNamespace(passes=3.25, passes_busy=2.0, passes_background=0.25)] * 2
    assert scaling.idle_fraction(turns) == pytest.approx(0.5)


def test_a_disturbed_turn_is_taken_again(scaling, monkeypatch):
    used = iter([0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 5.0, 5.1])  # before and after each look and turn
    monkeypatch.setattr(scaling, "busy_seconds", lambda: next(used))
    monkeypatch.setattr(scaling.time, "sleep", lambda seconds: None)
    clock = iter(range(100))
    monkeypatch.setattr(scaling.time, "perf_counter", lambda: float(next(clock)))
    asked = []

    def ask(*order):
        asked.append(order)
        return [SimpleNamespace(busy=0.05, background=0.05)]

    side = scaling.Side("a side", None, SimpleNamespace(ask=ask))
    turns, others, _ = scaling.QuietTurns(0.1, 50).take(side, 3, 1)
    assert len(asked) == 2
    assert others == pytest.approx(0.0)
    assert turns[0].busy == 0.05
