"""The layout that a run of several processes takes by itself, and those it has no use for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from pentameter.config.load import load_config
from pentameter.data.sizes import DataSizes
from pentameter.errors import ConfigError
from pentameter.processes.join import Meeting
from pentameter.processes.place import Place
from pentameter.train.best_layout import best_layout, choose_together

SIZES = DataSizes(vocab_size=20, rows_per_epoch=100)


@pytest.fixture
def config(tmp_path):
    shape = {"context_length": 16, "n_layers": 2, "n_heads": 2, "d_model": 16}
    overrides = {f"model.{key}": value for key, value in shape.items()}
    return load_config("quickstart", {**overrides, "train.batch_size": 8, "train.device": "cpu"})


def test_the_most_processes_that_a_layout_divides_by_are_used(config):
    best = best_layout(config, SIZES, 3, 3)
    assert (best.n_processes, best.n_spare) == (2, 1)
    assert "1 of 3 processes is spare, as no layout divides by 3" in str(best)
    assert best_layout(config, SIZES, 4, 4).n_spare == 0


def test_machines_are_used_whole(config):
    best = best_layout(config, SIZES, 6, 2)  # 6 and 5 divide nothing, and 5 are no whole machines
    assert (best.n_processes, best.n_spare) == (4, 2)


def test_what_exceeds_the_memory_is_no_reason_for_fewer(config):
    huge = load_config(config, {"model.d_model": 2**20, "train.batch_size": 64})
    with pytest.raises(ConfigError, match=r"--layout best: no layout of .* fits"):
        best_layout(huge, SIZES, 2, 2)


def test_rank_0_chooses_for_all(config, tmp_path, capsys):
    def choose(rank: int):
        place = Place(rank, 6, rank % 2, 2, "", "torchrun")
        meeting = Meeting(place, dist.FileStore(str(tmp_path / "store")))
        return choose_together(config, meeting, lambda: SIZES if rank == 0 else None)

    with ThreadPoolExecutor(6) as pool:
        chosen = list(pool.map(choose, range(6)))
    first, _ = chosen[0]
    assert all(config == first for config, _ in chosen)
    assert [(place.rank, place.world_size) for _, place in chosen] == [(r, 4) for r in range(6)]
    assert capsys.readouterr().err.count("the best of") == 1
