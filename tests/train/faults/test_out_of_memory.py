"""A step that goes out of memory ends the run with what would fit, and the run goes on with it."""

from types import SimpleNamespace

import pytest
import torch
from tiny_runs import fit, hashes

from pentameter.config.files.load import load_config
from pentameter.errors import TrainingFailedError
from pentameter.model.gpu.forms import PLAIN_FORMS
from pentameter.parallel.engine import Engine
from pentameter.planning.plan import make_plan
from pentameter.processes.failures.failure import failure_of
from pentameter.train import loop, start
from pentameter.train.faults import device_memory
from pentameter.train.faults.device_memory import is_out_of_memory, out_of_memory

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.6 GiB"


def out_in_step_seven(monkeypatch, where):
    """Have step 7 raise as PyTorch does: in its passes, or in its update, half of which is done."""
    home, name = {"passes": (Engine, "forward_backward"), "update": (loop, "update_weights")}[where]
    usual = getattr(home, name)

    def fails(*arguments, **named):
        engine = arguments[0]
        if calls.append(1) or len(calls) < 7:
            return usual(*arguments, **named)
        with torch.no_grad():
            for _, parameter in engine.named_parameters():
                parameter.grad = torch.full_like(parameter, torch.nan)
                if where == "update":
                    parameter.fill_(torch.nan)
        raise torch.OutOfMemoryError(CUDA)

    calls = []
    monkeypatch.setattr(home, name, fails)


@pytest.mark.parametrize("where", ["passes", "update"])
def test_a_step_out_of_memory_names_what_fits_and_the_run_goes_on_with_it(
    tmp_path, monkeypatch, where
):
    """It was a traceback and exit code 1."""
    sections = {"checkpoint": {"interval": 4}}
    undisturbed, _ = fit(tmp_path / "whole", sections=sections)
    with monkeypatch.context() as patch:
        out_in_step_seven(patch, where)
        with pytest.raises(TrainingFailedError) as caught:
            fit(tmp_path / "run", sections=sections)
    said = str(caught.value)
    assert said.startswith("out of memory after step 6, with 4 sequences at a time (planned: ")
    assert ": --train.micro-batch-size 2 takes less; the last checkpoint is step 4, where " in said
    failure = failure_of(caught.value)
    assert (failure.exit_code, failure.expected, failure.is_loss) == (70, True, False)
    assert hashes(tmp_path / "run", 4)  # it is verified
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    run, end = fit(
        tmp_path / "run", sections={**sections, "train": {"micro_batch_size": 2}}, resume="must"
    )
    assert (end.step, run.plan.n_micro_batches) == (12, 2)
    expected = dict(undisturbed.engine.named_parameters())
    for name, weight in run.engine.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


def test_a_model_that_no_memory_is_left_for_is_no_traceback(tmp_path, monkeypatch):
    """What was planned to fit may not: another program came, or the run was forced."""
    fit(tmp_path / "run", sections={"train": {"steps": 4}})

    def fails(*arguments, **named):
        raise torch.OutOfMemoryError(CUDA)

    with monkeypatch.context() as patch:
        patch.setattr(start, "build_engine", fails)
        with pytest.raises(TrainingFailedError) as caught:
            fit(tmp_path / "run", resume="extend")
    said = str(caught.value)
    assert said.startswith("out of memory before the first step, with 4 sequences at a time")
    assert said.endswith(": --train.micro-batch-size 2 takes less")
    assert failure_of(caught.value).exit_code == 70
    _, end = fit(tmp_path / "run", resume="extend")
    assert end.step == 12


def on_a_gpu(**train):
    chosen = SimpleNamespace(device=torch.device("cuda"), precision="bf16", forms=PLAIN_FORMS)
    settings = {f"train.{name}": value for name, value in train.items()}
    plan = make_plan(load_config("gpt2-124m", {"train.tokens_per_step": 65536, **settings}))
    return out_of_memory(plan, chosen, "after step 100")


def test_a_gpu_that_others_use_too_is_told_what_is_left(monkeypatch):
    """On 24 GB it takes the half; a browser that holds 14 GB leaves room for less."""
    monkeypatch.setattr(device_memory, "memory_bytes", lambda device: 24 * 10**9)
    monkeypatch.setattr(device_memory, "held_by_others", lambda device: 0)
    said = on_a_gpu(micro_batch_size=32)
    assert "where cuda has 24.0 GB: --train.micro-batch-size 16 takes less, and so does" in said
    assert said.endswith("train.offload with parallel.zero")
    monkeypatch.setattr(device_memory, "held_by_others", lambda device: 14 * 10**9)
    said = on_a_gpu(micro_batch_size=32)
    assert "24.0 GB, of which other programs hold 14.0 GB: --train.micro-batch-size 8 " in said
    said = on_a_gpu(micro_batch_size=1)
    assert "--train.activation-checkpoint full takes less" in said


def test_a_module_of_ones_own_is_told_of_smaller_micro_batches(monkeypatch):
    monkeypatch.setattr(device_memory, "memory_bytes", lambda device: None)
    layout = SimpleNamespace(n_batch_shards=2)
    config = SimpleNamespace(train=SimpleNamespace(offload=False))
    plan = SimpleNamespace(
        built_by="build", batch_size=24, micro_batch_size=6, layout=layout, config=config
    )
    chosen = SimpleNamespace(device=torch.device("cpu"))
    assert out_of_memory(plan, chosen, "now").endswith("cpu: --train.micro-batch-size 4 takes less")
    plan.micro_batch_size = 1
    assert out_of_memory(plan, chosen, "now").endswith(
        "a smaller model or more processes take less"
    )


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError(CUDA), True),
        (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 7.1 GB)"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("out of memory"), False),  # a hook's, of something else
        (TrainingFailedError("rank 1 was killed by SIGKILL (out of memory?)"), False),
    ],
)
def test_who_says_that_memory_is_used_up(error, is_memory):
    assert is_out_of_memory(error) == is_memory
