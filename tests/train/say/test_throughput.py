"""MFU, and what is said of a step that is slower than planned."""

import time
from types import SimpleNamespace

import pytest
import torch

from pentameter.config.files.load import load_config
from pentameter.estimating.seconds.cluster import parse_cluster
from pentameter.estimating.seconds.step_time import StepTime
from pentameter.machine import this_cluster
from pentameter.machine.fastest_matmul import Ceiling
from pentameter.machine.this_cluster import slow_step
from pentameter.planning.plan import make_plan
from pentameter.train.say import throughput
from pentameter.train.say.throughput import PlannedPace, Throughput


def mfu_of_steps(monkeypatch, seconds, ceiling_flops, again):
    """The utilisation of steps of a TFLOP that take so many seconds, under a measured ceiling;
    `again` are those that measuring once more gives."""
    clock = iter([each for took in seconds for each in (0.0, took)])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))
    plan = SimpleNamespace(
        tokens_per_step=1000, flops_per_token=1e9, layout=SimpleNamespace(world_size=2)
    )
    measure = None if again is None else lambda: Ceiling(again.pop(0))
    compute = SimpleNamespace(
        ceiling_flops=ceiling_flops, measure_again=measure, device=torch.device("cpu")
    )
    watch = Throughput(plan, compute)
    found = []
    for _ in seconds:
        with watch:
            pass
        watch.end_steps(1)
        found.append(watch.mfu)
    return found


def test_no_step_is_faster_than_the_measured_ceiling(monkeypatch):
    # 0.5 TFLOP/s on two devices, whose ceiling was measured while the machine was busy
    again = [1e12]
    assert mfu_of_steps(monkeypatch, [8, 2, 2, 2], 0.1e12, again) == [0.625, 0.25, 0.25, 0.25]
    assert again == []


def test_a_ceiling_is_measured_again_a_few_times_only(monkeypatch):
    again = [1e9] * throughput.MOST_MEASUREMENTS  # as low each time
    found = mfu_of_steps(monkeypatch, [9, 8, 7, 6, 5, 4, 8], 1e9, again)
    assert found == [1, 1, 1, 1, 1, 1, 0.5]
    assert again == []


def test_a_published_peak_stays(monkeypatch):
    assert mfu_of_steps(monkeypatch, [4], 0.1e12, None) == [1.25]


def test_a_slow_step_names_its_part():
    planned = StepTime(1.0, 0.7, 0.1, {"tensor": 0.2}, 0.0, {})
    said = slow_step(planned, 1.5, 0.01)
    assert "a step takes 1.5 s, 50% more than the 1 s planned" in said
    assert "0.2 s communication, 0.1 s of the pipeline's bubble" in said
    assert "compute or communication is" in said
    assert "0.4 s of it go to reading the batch" in slow_step(planned, 1.5, 0.4)
    assert "--train.compile true" in slow_step(planned, 1.5, 0.01, launches=True)


def test_pace_is_compared_once_after_it_settled(monkeypatch):
    said = []
    cluster = parse_cluster("h100-80gb:1x1").resized(1)
    monkeypatch.setattr(this_cluster, "this_cluster", lambda *sizes: (cluster, True))
    plan = make_plan(load_config("gpt2-124m", {"train.micro_batch_size": 16}))
    run = SimpleNamespace(
        plan=plan,
        world=SimpleNamespace(size=1, local_size=1, is_main=True),
        compute=SimpleNamespace(device=torch.device("cuda"), precision="bf16", compiled=False),
        console=SimpleNamespace(say=said.append),
    )
    for seconds, warns in ((0.01, False), (1000.0, True)):
        pace = PlannedPace(SimpleNamespace(input_seconds=0.0))
        pace.on_start(run)
        for number in range(40):
            pace.on_step(run, SimpleNamespace(step_seconds=seconds, step=number))
        assert bool(said) == warns
    assert len(said) == 1
    assert "needs to launch them" in said[0]


def countdown(monkeypatch, pace_of_step, n_steps, *, pauses=()):
    """The seconds left after each step, and the clock at the end."""
    clock = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock[0])
    counting, found = throughput._Countdown(), []
    for step in range(1, n_steps + 1):
        pace = pace_of_step(step)
        clock[0] += pace + (30.0 if step in pauses else 0.0)
        found.append((clock[0], counting.seconds(step, n_steps - step, pace)))
    return found


def test_the_time_left_counts_down(monkeypatch):
    found = countdown(monkeypatch, lambda _: 2.0, 500)
    assert all(left == pytest.approx(1000 - now) for now, left in found)


def test_a_busy_moment_does_not_move_it(monkeypatch):
    found = countdown(monkeypatch, lambda step: 6.0 if 200 <= step < 205 else 2.0, 1000)
    end = found[-1][0]
    # Five steps at three times the pace would have predicted 3,200 seconds more.
    assert max(abs(now + left - end) for now, left in found) < 600
    assert found[-1][1] == 0.0


def test_a_lasting_change_of_pace_is_followed(monkeypatch):
    found = countdown(monkeypatch, lambda step: 2.0 if step < 300 else 4.0, 1000)
    end = found[-1][0]
    assert all(abs(now + left - end) < 0.05 * (end - now) + 20 for now, left in found[450:])


def test_pauses_are_expected_again(monkeypatch):
    found = countdown(monkeypatch, lambda _: 2.0, 1000, pauses=range(50, 1001, 50))
    end = found[-1][0]
    assert all(abs(now + left - end) < 60 for now, left in found[300:])


def test_the_end_is_seen_coming(monkeypatch):
    """A machine that was busy almost to the end: what is left is not what was expected of it."""
    found = countdown(monkeypatch, lambda step: 0.2 if step < 1100 else 0.04, 1200)
    assert found[1099][1] > 10
    assert all(left < 1.5 for _, left in found[-20:])


@pytest.mark.parametrize(("size", "device"), [(1, "cpu"), (2, "cuda")])
def test_nothing_is_said_of_a_lone_process_or_a_gpus_own_time(size, device):
    watch = throughput_of(size, device)
    with watch:
        pass
    watch.end_steps(1)
    assert watch.take_own_time() is None


def test_a_ranks_own_time_is_what_it_computes_and_reads():
    watch = throughput_of(2, "cpu")
    for _ in range(2):
        with watch:
            with watch.reading_batch():
                time.sleep(0.05)  # from a slow disk
            time.sleep(0.2)  # in a collective
        watch.end_steps(1)
    own = watch.take_own_time()
    assert own is not None
    assert own.n_steps == 2
    assert own.step_seconds > 0.25
    assert 0.05 <= own.own_seconds < own.step_seconds - 0.1
    assert watch.take_own_time() is None
    watch.close()


def throughput_of(size, device):
    plan = SimpleNamespace(
        tokens_per_step=1, flops_per_token=1.0, layout=SimpleNamespace(world_size=size)
    )
    compute = SimpleNamespace(ceiling_flops=1e30, measure_again=None, device=torch.device(device))
    return Throughput(plan, compute)
