"""A checkpoint takes longer to be hashed than processes may wait for each other: nobody notices."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from slow_disks import sections, train
from tiny_runs import events

from pentameter.checkpoint.folders.verification import hashed_by
from pentameter.checkpoint.format.manifest import read_manifest
from pentameter.disk.atomic import FileRecord

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from layout_worlds import run_world


@pytest.fixture
def run(tmp_path):
    """A run of 12 steps of two processes, with checkpoints at 4, 5, 8, 10 and 12."""
    run_world(2, _quickly, tmp_path / "run")
    return tmp_path / "run"


def _quickly(world, run):
    return train(world, run, sections=sections(), slow=False)


def _resumed(world, run):
    return train(world, run, sections=sections(), resume="must")


def _extended(world, run):
    longer = sections(keep_last=2)
    longer["train"]["steps"] = 24
    return train(world, run, sections=longer, resume="extend")


def files_of(run, step):
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {f"{folder.name}/{record.name}" for record in read_manifest(folder).files}


def test_each_rank_hashes_its_share_once_and_nobody_waits_in_a_collective(run):
    files = files_of(run, 12)
    (end, first), (_, second) = run_world(2, _resumed, run)
    assert end == "completed"
    assert sorted([*first, *second]) == sorted(files)
    large = [sum("safetensors" in name for name in share) for share in (first, second)]
    assert sum(large) == 4
    assert all(large)  # by their bytes, not by their number


@pytest.mark.slow
def test_extending_pruning_rolling_back_and_the_best_at_the_end(run):
    expected = files_of(run, 12) | files_of(run, 10)
    (end, first), (_, second) = run_world(2, _extended, run, seconds=240)
    assert end == "completed"
    assert [(e["step"], e["to_step"]) for e in events(run, "rollback")] == [(19, 15)]
    tested = [e["step"] for e in events(run, "eval") if e["split"] == "test"][-1]
    assert tested not in (12, 24)  # the best was opened, and the last
    hashed = Counter([*first, *second])
    assert expected <= hashed.keys()  # to extend and resume; and to keep two
    assert {name.partition("/")[0][-2:] for name in hashed} == {"10", "12", "15", "24", f"{tested}"}
    assert set(hashed.values()) == {1}


def test_shares_are_alike_and_of_each_file_one():
    files = [FileRecord(f"{n}.safetensors", 100 + n % 3, "") for n in range(64)]
    files += [FileRecord("state.json", 5, ""), FileRecord("config.toml", 1, "")]
    shares = [hashed_by(files, rank, 8) for rank in range(8)]
    assert sorted(each.name for share in shares for each in share) == sorted(f.name for f in files)
    sizes = [sum(each.n_bytes for each in share) for share in shares]
    assert max(sizes) - min(sizes) <= 102
    assert hashed_by(files[:1], 3, 8) == []
