"""The layout that a run of several processes takes by itself, and those it has no use for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

import pentameter as pm
from pentameter.autotune import best_layout as choice
from pentameter.autotune.best_layout import best_layout, choose_together
from pentameter.cli.main import main
from pentameter.config.files.load import load_config
from pentameter.config.files.write import to_toml
from pentameter.data.sizes import DataSizes
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.fit import MEMORY_MARGIN
from pentameter.estimating.search.search import all_candidates
from pentameter.machine.this_cluster import this_cluster
from pentameter.processes.group.join import Meeting
from pentameter.processes.group.rank import LaunchedRank

SIZES = DataSizes(vocab_size=20, rows_per_epoch=100)


@pytest.fixture
def config(tmp_path):
    shape = {"context_length": 16, "n_layers": 2, "n_heads": 2, "d_model": 16}
    overrides = {f"model.{key}": value for key, value in shape.items()}
    return load_config("quickstart", {**overrides, "train.batch_size": 8, "train.device": "cpu"})


def test_the_most_processes_that_a_layout_divides_by_are_used(config):
    best = best_layout(config, 3, 3, SIZES)
    assert (best.n_processes, best.n_spare) == (2, 1)
    assert "1 of 3 processes is spare, as no layout divides by 3" in str(best)
    assert best_layout(config, 4, 4, SIZES).n_spare == 0


def test_machines_are_used_whole(config):
    best = best_layout(config, 6, 2, SIZES)  # 6 and 5 divide nothing, and 5 are no whole machines
    assert (best.n_processes, best.n_spare) == (4, 2)


def test_what_is_tight_is_taken_last_and_said(config, monkeypatch):
    config = load_config(config, {"model.context_length": 256, "train.batch_size": 64})
    cluster, _ = this_cluster(1, 1)
    every = all_candidates(config, cluster, SIZES.vocab_size, SIZES.rows_per_epoch)
    needed = [every.device_bytes(each) for each in every.by_bound]

    def best_with(n_bytes):
        device = cluster.device.model_copy(update={"memory_bytes": float(n_bytes)})
        smaller = cluster.model_copy(update={"device": device})
        monkeypatch.setattr(choice, "this_cluster", lambda *sizes: (smaller, True))
        return best_layout(config, 1, 1, SIZES)

    wide = best_with(1e12)
    assert "tight" not in str(wide)
    fastest = wide.estimate.device_bytes
    assert min(needed) * (1 + MEMORY_MARGIN) < fastest
    other = best_with(fastest).estimate  # in which the fastest is tight
    assert other.fits
    assert other.time.seconds > wide.estimate.time.seconds
    tight = best_with(min(needed))
    assert tight.estimate.verdict == "tight"
    assert "; tight: 0 B of memory to spare" in str(tight)


def test_what_exceeds_the_memory_is_no_reason_for_fewer(config):
    huge = load_config(config, {"model.d_model": 2**20, "train.batch_size": 64})
    with pytest.raises(ConfigError, match=r"--layout best: no layout of .* fits"):
        best_layout(huge, 2, 2, SIZES)


def test_python_chooses_what_the_command_does(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = load_config(config, {"model.vocab_size": 20})
    Path("asked.toml").write_text(to_toml(config))
    assert main(["train", "asked.toml", "--layout=best", "--print-config"]) == 0
    Path("chosen.toml").write_text(capsys.readouterr().out)
    best = pm.best_layout(config)
    assert best.n_processes == 1
    assert best.of(config) == load_config("chosen.toml")


def test_rank_0_chooses_for_all(config, tmp_path, capsys):
    def choose(rank: int):
        launched = LaunchedRank(rank, 6, rank % 2, 2, "", "torchrun")
        meeting = Meeting(launched, dist.FileStore(str(tmp_path / "store")))
        return choose_together(config, meeting, lambda: SIZES if rank == 0 else None)

    with ThreadPoolExecutor(6) as pool:
        chosen = list(pool.map(choose, range(6)))
    first, _ = chosen[0]
    assert all(config == first for config, _ in chosen)
    assert [(launched.rank, launched.world_size) for _, launched in chosen] == [
        (r, 4) for r in range(6)
    ]
    assert capsys.readouterr().err.count("the best of") == 1
