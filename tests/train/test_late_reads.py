"""A host that reads a step's numbers late, as beside a GPU: what it reads, and that nothing else
changes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from late_reads import run_counted
from tiny_runs import config, events, hashes, recorded

from pentameter.optim.build import JointOptimizer, can_step_unless
from pentameter.processes.group.world import World
from pentameter.train.compute import Compute
from pentameter.train.loop import reads_late

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from layout_worlds import run_world


def long_run(n_experts=None, **parallel):
    """Twenty steps, logged every five, nothing else but what ends the run."""
    return config(
        model={"n_experts": n_experts},
        train={"steps": 20, "eval_interval": None, "batch_size": 4},
        checkpoint={"interval": 20, "asynchronous": False},
        log={"interval": 5},
        parallel=parallel,
    )


def counted(n_processes, chosen, run, late, *bad, **options):
    """What each process read and said, by step."""
    if n_processes == 1:
        return [run_counted(World(), chosen, run, late, *bad, **options)]
    return run_world(n_processes, run_counted, chosen, run, late, *bad, *options.values())


@pytest.mark.parametrize(
    ("n_experts", "parallel"),
    [(3, {}), (None, {"data": 2}), (3, {"data": 2, "zero": 2})],
    ids=["one with experts", "data", "zero with experts"],
)
def test_steps_that_are_not_logged_read_nothing_and_say_nothing(tmp_path, n_experts, parallel):
    n_processes = parallel.get("data", 1)
    for reads, words in counted(
        n_processes, long_run(n_experts, **parallel), tmp_path / "run", True, set(), set()
    ):
        # The last step is followed by a save, which reads every tensor.
        assert {step: n for step, n in reads.items() if 0 < step < 20} == dict.fromkeys(
            (1, 5, 10, 15), 1
        )
        asked = {} if n_processes == 1 else dict.fromkeys((1, 5, 10, 15), 1)
        assert {step: n for step, n in words.items() if 0 < step < 20} == asked


@pytest.mark.parametrize(
    "parallel", [{}, {"data": 2}, {"data": 2, "zero": 2}], ids=["one", "data", "zero"]
)
def test_reading_late_changes_no_bit(tmp_path, parallel):
    bad = ({3, 11}, {0, 7, 8})
    for late in (True, False):
        run = tmp_path / str(late)
        counted(parallel.get("data", 1), long_run(**parallel), run, late, *bad)
    late, at_once = tmp_path / "True", tmp_path / "False"
    assert recorded(late) == recorded(at_once)
    assert [e["step"] for e in events(late, "skip")] == [1, 4, 8, 9, 12]
    assert hashes(late, 20) == hashes(at_once, 20)


def test_a_run_that_gives_up_does_so_at_the_same_step(tmp_path):
    bad = (set(range(6, 11)), set())
    for late in (True, False):
        counted(1, long_run(), tmp_path / str(late), late, *bad)
    assert recorded(tmp_path / "True") == recorded(tmp_path / "False")
    end = events(tmp_path / "True", "end")[-1]
    assert (end["kind"], end["step"]) == ("error", 10)


def test_what_falls_due_between_two_logged_steps_is_done_there(tmp_path):
    sections = {
        "train": {"steps": 14, "eval_interval": 3, "sample_interval": 7, "sample_tokens": 4},
        "checkpoint": {"interval": 4, "asynchronous": False, "keep_last": 9},
        "log": {"interval": 13},
    }
    for late in (True, False):
        counted(1, config(**sections), tmp_path / str(late), late, {4}, set())
    late, at_once = tmp_path / "True", tmp_path / "False"
    assert recorded(late) == recorded(at_once)
    assert [e["step"] for e in events(late, "eval")] == [0, 3, 6, 9, 12, 14]
    for step in (4, 8, 12, 14):
        assert hashes(late, step) == hashes(at_once, step)
        state = [
            json.loads((run / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())
            for run in (late, at_once)
        ]
        assert state[0]["epoch"]["loss"] == state[1]["epoch"]["loss"]
        assert state[0]["tokens"] == state[1]["tokens"]


def test_ranks_ask_for_signals_in_time_however_seldom_steps_are_logged(tmp_path):
    sparse = long_run().model_copy(update={"log": config(log={"interval": 1000}).log})
    ((reads, _),) = counted(1, sparse, tmp_path / "run", True, set(), set(), prompt_seconds=1e-9)
    assert {step: n for step, n in reads.items() if 0 < step < 20} == dict.fromkeys(range(1, 20), 1)


def test_steps_that_are_read_together_ask_for_the_peak_once(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Compute, "peak_memory_bytes", lambda compute: asked.append(1) or 9)
    counted(1, long_run(), tmp_path / "run", True, set(), set())
    assert len(asked) == 5  # after steps 1, 5, 10, 15 and 20
    assert {e["peak_memory_bytes"] for e in events(tmp_path / "run", "train")} == {9}


def test_only_a_gpu_and_an_update_that_it_can_leave_out_are_read_late():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    fused = torch.optim.AdamW(parameters, fused=True)

    class OtherHasAHook(World):
        def all_reduce_max(self, value):
            return 1

    def is_late(waits=True, precision="bf16", optimizer=fused, hooks=(), offload=False, world=None):
        chosen = config(train={"offload": offload}, parallel={"zero": 3} if offload else {})
        engine = SimpleNamespace(
            host_waits=waits,
            arithmetic=SimpleNamespace(precision=precision),
            plan=SimpleNamespace(config=chosen),
        )
        world = world or World()
        return reads_late(SimpleNamespace(engine=engine, optimizer=optimizer, world=world), hooks)

    assert is_late()
    assert is_late(hooks=[SimpleNamespace(on_eval=print)])
    assert not is_late(waits=False)
    assert not is_late(world=OtherHasAHook(0, 2))
    assert not is_late(precision="fp16")
    assert not is_late(offload=True)
    assert not is_late(hooks=[SimpleNamespace(on_step=print)])
    assert not is_late(hooks=[SimpleNamespace(on_skip=print)])
    for other in (
        torch.optim.AdamW(parameters, fused=False),
        torch.optim.SGD(parameters, fused=True),
        JointOptimizer(fused),
    ):
        assert not can_step_unless(other)
        assert not is_late(optimizer=other)
