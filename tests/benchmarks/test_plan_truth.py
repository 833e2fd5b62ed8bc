"""`benchmarks/plan_truth.py`: that what it measures is planned in the same units, and counted."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = """
[devices.cpu]
tflops = { bf16 = 1.0, fp32 = 0.2 }
memory_bytes = 16e9
memory_bytes_per_second = 2e10
link_bytes_per_second = 2e9
shared = true
source = "by hand"
date = "2026-11"
"""


def test_every_case_can_be_planned(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    truth = importlib.import_module("plan_truth")
    table = tmp_path / "machine.toml"
    table.write_text(TABLE, encoding="utf-8")
    layouts = {str(truth.planned(name, table).plan.layout) for name in truth.CASES}
    assert len(layouts) >= 6
    times = [truth.planned(name, table).time.seconds for name in truth.CASES]
    assert min(times) > 0


@pytest.mark.slow
def test_it_measures(tmp_path):
    table = tmp_path / "machine.toml"
    table.write_text(TABLE, encoding="utf-8")
    arguments = ["--table", str(table), "--steps", "1", "--only", "characters, ZeRO 3", "--json"]
    paths = [ROOT / "src", ROOT / "tests" / "parallel"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "plan_truth.py"), *arguments],
        capture_output=True, text=True, check=False, timeout=300,
        env={"PYTHONPATH": ":".join(map(str, paths))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    # What the Plan counts is exact but for the loss's small tensors (tests/parallel).
    assert row["planned_bytes"] == pytest.approx(row["measured_bytes"], rel=0.05)
    assert row["measured_seconds"] > 0
