"""`benchmarks/gpu_day.py`: that no item fails by itself, so that on the day only a card can."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu_day(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_day

    return gpu_day


def lines_of(folder):
    return [json.loads(line) for line in (folder / "gpu_day.jsonl").read_text().splitlines()]


def test_an_item_ends_at_its_limit_and_the_day_goes_on(gpu_day, tmp_path, monkeypatch):
    script = tmp_path / "items.py"
    script.write_text("import sys, time\ntime.sleep(600 if 'slow' in sys.argv else 0)\n")
    monkeypatch.setattr(gpu_day, "__file__", str(script))
    monkeypatch.setattr(gpu_day, "ITEMS", {"slow": ("", 0.5, False), "quick": ("", 60, True)})
    day = gpu_day.Day(argparse.Namespace(seconds=60, out=tmp_path, device="cuda"))
    day.begin("slow")
    day.wait(0)
    day.begin("quick")
    day.wait(0)
    slow, quick = lines_of(tmp_path)
    assert (slow["item"], slow["ended"]) == ("slow", "out of time")
    assert (quick["item"], quick["ended"]) == ("quick", 0)
    day.asked.seconds = 1
    day.begin("quick")
    assert lines_of(tmp_path)[-1]["skipped"] == "no time left"


def test_the_page_has_a_table_for_each_kind_of_line(gpu_day, tmp_path):
    rows = [
        {"item": "equal", "model": "dense", "fp64": 1e-15},
        {"item": "equal", "model": "lora", "fp64": 2e-15},
        {"item": "equal", "error": "a | b"},
        {"item": "equal", "ended": 0, "seconds": 3.0},
        {"item": "nccl", "layout": "data"},
    ]
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "gpu_day.jsonl").write_text(text)
    gpu_day.write_page(tmp_path)
    page = (tmp_path / "gpu_day.md").read_text()
    assert "## equal (exit 0 after 3.0 s)" in page
    assert "| dense | 1e-15 |\n| lora | 2e-15 |" in page
    assert "a \\| b" in page
    assert "## nccl (cut off)" in page


def test_every_item_runs_on_a_cpu(gpu_day, tmp_path):
    """At small sizes: what they say of numbers holds there, too."""
    command = [sys.executable, str(BENCHMARKS / "gpu_day.py"), "--device", "cpu"]
    subprocess.run(
        [*command, "--seconds", "2400", "--out", str(tmp_path)], check=True, capture_output=True
    )
    rows = lines_of(tmp_path)
    assert {row["item"]: row["ended"] for row in rows if "ended" in row} == dict.fromkeys(
        gpu_day.ITEMS, 0
    )
    assert not [row for row in rows if "error" in row and "triton" not in row["error"]]
    precise = [row["fp64"] for row in rows if "fp64" in row]
    assert len(precise) > 6
    assert max(precise) < 1e-9
    (undisturbed,) = (row for row in rows if "worst_loss_difference" in row)
    assert undisturbed["worst_loss_difference"] == 0
    assert all(row["right"] for row in rows if "hang" in row)
