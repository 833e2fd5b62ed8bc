"""A save by several processes that fails, or dies, in any one of them."""

from __future__ import annotations

import os

import pytest
from failing_worlds import BROKEN, die_at_each, fail_in_turn, refuse_in_turn
from layout_worlds import run_world


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    return run_world(2, fail_in_turn, tmp_path_factory.mktemp("failures"))


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_a_failure_in_one_process_is_a_storage_error_in_each(failed, case):
    for of_rank in failed:
        error, names = of_rank[case]
        assert error.startswith("StorageError: "), error
        assert os.strerror(case.number) in error
        assert names == ["step-00000001"]  # nothing half-written, the previous one whole


def test_what_cannot_be_saved_is_refused_in_each(tmp_path):
    for of_rank in run_world(2, refuse_in_turn, tmp_path):
        assert "ValueError" in of_rank["state"]
        assert "TypeError: tensor 'norm.weight'" in of_rank["tensor"]
        assert "ValueError: 'embedding.weight' cannot be saved" in of_rank["missing part"]
        assert "hold 264 of the 520 elements" in of_rank["missing part"]
        assert "StorageError: cannot write" in of_rank["space"]
        assert of_rank["names"] == ["step-00000001"]


@pytest.mark.parametrize(
    ("scene", "rank", "how"),
    [
        ("next", 0, "waited for"),
        ("next", 1, "waited for"),
        ("next", 0, "beside training"),
        ("next", 1, "beside training"),
        ("again", 0, "beside training"),
        pytest.param("again", 0, "waited for", marks=pytest.mark.slow),
    ],
)
def test_a_kill_before_any_operation_leaves_a_whole_checkpoint(tmp_path, scene, rank, how):
    """SIGKILL before each file-system operation of one of two processes: the other leaves too,
    and the old or the new checkpoint is there."""
    (n_operations,) = run_world(1, die_at_each, tmp_path, scene, rank, how, seconds=600)
    assert n_operations > (30 if rank == 0 else 8)
