"""`benchmarks/train_gpu.py`: that it runs, and that its figures follow from one another."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def train_gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("train_gpu")


@pytest.fixture
def gpu_turns(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_turns")


def run(tmp_path, *arguments):
    """What the script printed, and its JSON."""
    path = tmp_path / "result.json"
    script = [sys.executable, str(BENCHMARKS / "train_gpu.py"), "--json", str(path)]
    done = subprocess.run(
        [*script, "--rounds", "1", "--seconds", "0.01", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text(encoding="utf-8"))


def check(result):
    """Both sides did the same work, and the figures agree with one another."""
    ours, plain = result["ours"], result["plain"]
    assert ours["n_parameters"] == plain["n_parameters"]
    assert result["tokens_per_step"] == (
        result["n_micro_batches"] * result["micro_batch_size"] * result["context_length"]
    )
    assert result["ratio"] == pytest.approx(
        ours["tokens_per_second"] / plain["tokens_per_second"], rel=1e-9
    )
    # after a few steps on random tokens both still guess among 250: ln 250 = 5.52
    assert ours["loss"] == pytest.approx(5.52, abs=0.2)
    assert plain["loss"] == pytest.approx(5.52, abs=0.2)


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path):
    output, result = run(tmp_path, "--device", "cpu", "--sizes", "tiny", "--eager", "--profile")
    check(result["sizes"]["tiny"])
    assert result["peak_flops"] is None
    assert result["sizes"]["tiny"]["ours"]["mfu"] is None
    assert result["environment"]["versions"]["torch"] == str(torch.__version__)
    assert "tiny, ours, one step" in output


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_runs_on_a_gpu(tmp_path):
    _output, result = run(tmp_path, "--sizes", "tiny", "--profile")
    check(result["sizes"]["tiny"])
    assert result["device_name"] == torch.cuda.get_device_name()
    for name in ("ours", "plain"):
        # its own weights, gradients and two moments, in fp32, and not the GPU's whole memory
        peak = result["sizes"]["tiny"][name]["peak_memory_bytes"]
        assert 16 * result["sizes"]["tiny"][name]["n_parameters"] < peak < 2**30


def test_the_sizes_are_the_published_ones(train_gpu):
    plan = next(train_gpu.plans("gpt2-124m", None))
    assert plan.tokens_per_step == 524_288
    assert plan.vocab_size_padded == 50_304
    # 854.7 MFLOP per token without the biases, the padded rows counted
    assert plan.flops_per_token == 6 * 123_587_328 + 12 * 12 * 768 * 1024
    char = next(train_gpu.plans("char", None))
    assert char.tokens_per_step == 64 * 256
    assert round(char.flops_per_token / 1e6) == 71
    sizes = [plan.micro_batch_size for plan in train_gpu.plans("char", 16)]
    assert sizes == [16, 8, 4, 2, 1]


def test_a_side_says_when_memory_is_short(gpu_turns, monkeypatch):
    def no_room(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(gpu_turns.SIDES, "ours", no_room)
    sent = []
    machine = gpu_turns.Machine(torch.device("cpu"), "fp32", compiled=False)
    pipe = SimpleNamespace(send=sent.append, recv=lambda: None)
    gpu_turns.serve(pipe, "ours", None, machine)
    assert isinstance(sent[0], gpu_turns.OutOfDeviceMemoryError)

    monkeypatch.setitem(gpu_turns.SIDES, "ours", lambda *arguments, **options: 1 / 0)
    gpu_turns.serve(pipe, "ours", None, machine)
    assert "ZeroDivisionError" in str(sent[1])
    assert not isinstance(sent[1], gpu_turns.OutOfDeviceMemoryError)


def test_smaller_micro_batches_are_tried_until_they_fit(train_gpu, monkeypatch):
    class Sides:
        def __init__(self, plan, machine):
            self.plan = plan

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def warm_up(self, n_steps):
            pass

        def turn(self, name, first, n_steps, *, profiled=False):
            if name == "ours" and self.plan.micro_batch_size > 2:
                raise train_gpu.OutOfDeviceMemoryError("full")
            seconds = 0.5 if name == "ours" else 1.0
            return train_gpu.Turn(seconds, 5.5, 1000, 10, "table" if profiled else None)

    monkeypatch.setattr(train_gpu, "Sides", Sides)
    asked = SimpleNamespace(micro_batch_size=None, rounds=3, seconds=1.0, profile=True)
    plan, records = train_gpu.measure("tiny", None, asked)
    assert plan.micro_batch_size == 2
    assert records["ours"].seconds == [0.5] * 3  # a profiled turn is not among the timed ones
    assert records["ours"].profile == "table"
    figures = train_gpu.summary(plan, records, 1e12, 5e11)
    assert figures["ratio"] == 2.0
    flops = plan.tokens_per_step * plan.flops_per_token / 0.5
    assert figures["ours"]["mfu"] == pytest.approx(flops / 1e12)
    assert figures["ours"]["share_of_ceiling"] == pytest.approx(flops / 5e11)
