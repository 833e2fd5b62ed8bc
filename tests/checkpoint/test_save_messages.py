"""What processes say to each other in a save does not grow with the model."""

from __future__ import annotations

import pytest
from layout_worlds import run_world
from message_worlds import MESHES, compare_owners, count_messages, save_what_only_some_hold


@pytest.mark.parametrize("n_processes", [2, 4])
def test_no_message_of_a_save_grows_with_the_number_of_tensors(tmp_path, n_processes):
    for sent in run_world(n_processes, count_messages, tmp_path):
        for sizes in MESHES[n_processes]:
            few, many = sent[f"{sizes} 10"], sent[f"{sizes} 100"]
            assert len(few) == len(many) <= 8
            # But for numbers of bytes and lengths of paths, which take a few bytes more.
            assert all(abs(a - b) <= 16 for a, b in zip(few, many, strict=True)), (few, many)


@pytest.mark.parametrize("n_processes", [2, 4])
def test_placements_say_who_holds_a_region(tmp_path, n_processes):
    assert run_world(n_processes, compare_owners, tmp_path) == [[]] * n_processes


def test_regions_are_exchanged_once_where_placements_do_not_say_it(tmp_path):
    for found in run_world(2, save_what_only_some_hold, tmp_path):
        first, again, changed = map(len, found["sent"])
        assert again < first == changed
        assert found["names"] == sorted(f"{rank}.{n}.moment" for rank in (0, 1) for n in range(10))
