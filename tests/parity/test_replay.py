"""A step of any layout, computed again: to the bit on its own, to rounding on another one."""

import pytest

from trials.layout_runs import TINY, changed, replay_here

SAVED = changed(TINY, {"checkpoint.keep_last": 9, "train.micro_batch_size": 2})
LAYOUTS = {
    "data=2,zero=1": (2, ["data=1", "pipeline=2"]),
    "tensor=2": (2, []),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_the_same_on_its_layout_and_to_rounding_elsewhere(runs, layout):
    size, others = LAYOUTS[layout]
    parallel = dict(part.split("=") for part in layout.split(","))
    config = changed(SAVED, {f"parallel.{key}": int(value) for key, value in parallel.items()})
    run = runs.train(config, size)
    found, *rest = runs.do(size, replay_here, run.folder, 6)
    assert (found["equal"], found["steps"], found["layout"]) == ("bits", [4, 5, 6], layout)
    assert not found["weights"]["different"]
    assert all(each == found for each in rest)
    for other in others:
        found = runs.do(1 if other == "data=1" else 2, replay_here, run.folder, 6, other)[0]
        assert found["agrees"], found
        assert found["verdict"] == "batch"
        assert found["weights"]["weights_distance"] < 1e-5
