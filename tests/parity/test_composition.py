"""What is decided in a run is decided by all processes together, and settings compose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from parity_hooks import OverflowInOne, SpoilInOne, StopInOne

from pentameter.cli.main import main
from trials.layout_runs import Run, changed

ROUNDING = 1e-9
TINY = {
    "name": "tiny",
    "model.vocab_size": 16,
    "model.context_length": 16,
    "model.n_layers": 2,
    "model.attention.n_heads": 2,
    "model.d_model": 16,
    "model.dropout": 0.1,
    "data.grammar.n_characters": 4000,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
    "schedule.min_learning_rate": 0.0,
    "train.steps": 8,
    "train.batch_size": 8,
    "train.micro_batch_size": 2,
    "train.eval_interval": 4,
    "train.precision": "fp64",
    "train.compile": False,
    "log.interval": 1,
}

LAYOUTS = {
    "data": {},
    "zero 3": {"parallel.zero": 3},
    "tensor": {"parallel.tensor": 2},
    "pipeline": {"parallel.pipeline": 2},
}


@pytest.fixture(scope="module")
def tiny():
    return changed("grammar", TINY)


def curve(run: Run) -> list[float]:
    """Loss and gradient norm of every step, one after the other."""
    return [number for key in ("loss", "grad_norm") for number in run.numbers(key)]


# -- what all processes agree on ----------------------------------------------------------------


@pytest.fixture(scope="module")
def overflowed_alone(runs, tiny):
    config = changed(tiny, {"train.precision": "fp16"})
    return runs.train(config, hook=partial(OverflowInOne, steps=(2, 5)))


def test_a_run_is_extended_by_more_processes_too(runs, tiny):
    longer = {"schedule.name": "cosine", "train.steps": 12}
    numbers = []
    for size in (1, 2):
        begun = runs.train(changed(tiny, {"schedule.name": "cosine"}))
        run = runs.train(changed(tiny, longer), size, folder=begun.folder, resume="extend")
        assert run.end.reason == "completed"
        assert run.numbers("step") == list(range(1, 13))
        numbers.append(curve(run) + run.numbers("learning_rate"))
    assert numbers[1] == pytest.approx(numbers[0], abs=ROUNDING)


@pytest.mark.parametrize("layout", ["data", "zero 3"])
def test_a_nan_in_one_process_is_saved_by_none(runs, tiny, layout):
    config = changed(tiny, LAYOUTS[layout], {"checkpoint.interval": 3, "train.eval_interval": None})
    run = runs.train(config, 2, hook=partial(SpoilInOne, step=6))
    assert run.end.reason.startswith("TrainingFailedError: step 6 is not saved: model tensor ")
    assert "on rank 1 is not finite; the last checkpoint is step 3" in run.end.reason
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_in_one_process_skips_the_step_in_all(runs, tiny, overflowed_alone, layout):
    config = changed(tiny, LAYOUTS[layout], {"train.precision": "fp16"})
    run = runs.train(config, 2, hook=partial(OverflowInOne, steps=(2, 5)))
    for each in (run, overflowed_alone):
        assert each.numbers("step", "skip") == [3, 6]
        assert each.end.state["loss_scale"]["scale"] == 2.0**14  # 2^16, halved twice, in each
        assert each.end.state["loss_scale"]["good_steps"] == 2
        assert each.end.state["consecutive_skips"] == 0
    # A product of two halves is rounded twice to 11 bits where the whole is once.
    assert run.numbers() == pytest.approx(overflowed_alone.numbers(), rel=2**-9)


def test_patience_ends_in_all_processes_where_it_ends_in_one(runs, tiny):
    """A little warm-up is the best this run ever was: its rate is far too high."""
    config = changed(
        tiny,
        {
            "optimizer.learning_rate": 0.3,
            "schedule.warmup_steps": 100,
            "train.steps": 100,
            "train.eval_interval": 2,
            "train.patience": 2,
        },
    )
    alone = runs.train(config)
    assert alone.end.reason == "no better validation loss in 2 evaluations"
    for layout in LAYOUTS.values():
        run = runs.train(changed(config, layout), 2)
        assert (run.end.step, run.end.reason) == (alone.end.step, alone.end.reason)
        assert run.end.state["best"]["step"] == alone.end.state["best"]["step"]


@pytest.mark.parametrize("layout", ["data", "pipeline"])
def test_one_process_may_stop_them_all(runs, tiny, layout):
    run = runs.train(changed(tiny, LAYOUTS[layout]), 2, hook=partial(StopInOne, step=3))
    assert (run.end.step, run.end.reason) == (3, "one of us has had enough")
    assert run.events("checkpoint")[-1]["step"] == 3


# -- a signal to one process, of a real launch --------------------------------------------------


def command(folder: Path, config: Path) -> list[str]:
    return [
        sys.executable, "-m", "pentameter", "train", str(config), "--run-dir", str(folder),
        "--nproc", "2",
    ]  # fmt: skip


def worker(launcher: int, rank: int) -> int:
    """The process id of a worker."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"none of {children} is rank {rank}")


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        metrics = run / "metrics.jsonl"
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[1]}")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds workers in /proc")
def test_sigterm_to_one_worker_saves_and_stops_all(runs, tiny, tmp_path):
    from pentameter.config.files.write import to_toml

    config = changed(tiny, {"train.steps": 80, "train.eval_interval": None})
    undisturbed = runs.train(config, 2)
    path, folder = tmp_path / "tiny.toml", tmp_path / "run"
    path.write_text(to_toml(config), encoding="utf-8")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    launch = partial(
        subprocess.Popen,
        command(folder, path),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process = launch()
    try:
        wait_for_step(folder, 10, process)
        os.kill(worker(process.pid, 1), signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 75, said
    assert said.count("stopped by SIGTERM after step") == 1
    run = Run(folder, [])
    stopped = run.numbers("step")[-1]
    assert 10 <= stopped < 80
    assert run.numbers("step", "checkpoint")[-1] == stopped
    process = launch()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert run.numbers("step") == list(range(1, 81))
    assert curve(run) == curve(undisturbed)


# -- settings on layouts ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_alone(runs, tiny):
    return runs.train(tiny)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("zero", [1, 3])
def test_offloaded_state_trains_alike(runs, tiny, tiny_alone, size, zero):
    config = changed(tiny, {"parallel.zero": zero, "train.offload": True})
    assert curve(runs.train(config, size)) == pytest.approx(curve(tiny_alone), rel=ROUNDING)


def test_a_weighted_partition_gives_the_last_stage_fewer_layers(runs, tiny):
    """512 rows of a head are worth 2.3 layers of this width."""
    wide = {"model.vocab_size": 512, "model.n_layers": 6, "parallel.partition": "weighted"}
    alone = runs.train(changed(tiny, wide))
    run = runs.train(changed(tiny, wide, LAYOUTS["pipeline"]), 2)
    assert "rank 0: layers 0-3" in run.log()
    assert "rank 1: layers 4-5" in run.log()
    assert curve(run) == pytest.approx(curve(alone), rel=ROUNDING)
    uniform = changed(tiny, wide, LAYOUTS["pipeline"], {"parallel.partition": "uniform"})
    log = runs.train(changed(uniform, {"train.steps": 1}), 2).log()
    assert "rank 0: layers 0-2" in log
    assert "rank 1: layers 3-5" in log


RECOMPUTED: list[tuple[int, dict[str, object]]] = [
    (2, {"parallel.zero": 3, "train.activation_checkpoint": "selective"}),
    (
        2,
        {
            "parallel.pipeline": 2,
            "parallel.schedule": "1f1b",
            "train.activation_checkpoint": "full",
        },
    ),
    (
        4,
        {
            "parallel.tensor": 2,
            "parallel.sequence": True,
            "parallel.pipeline": 2,
            "train.activation_checkpoint": "selective",
        },
    ),
]


@pytest.mark.parametrize(("size", "changes"), RECOMPUTED, ids=["zero", "zero-bubble", "sequence"])
def test_activations_are_recomputed_alike(runs, tiny, tiny_alone, size, changes):
    run = runs.train(changed(tiny, changes), size)
    assert curve(run) == pytest.approx(curve(tiny_alone), rel=ROUNDING)


COMPILED: list[Any] = [
    # Of 21 rows one process has 11: what is compiled for one is no code for the other.
    (2, {**LAYOUTS["tensor"], "model.vocab_multiple": 7}),
    *(
        pytest.param(size, changes, marks=pytest.mark.slow)
        for size, changes in (
            (
                2,
                {
                    **LAYOUTS["tensor"],
                    "parallel.sequence": True,
                    "train.activation_checkpoint": "full",
                },
            ),
            (2, LAYOUTS["data"]),
            (2, LAYOUTS["zero 3"]),
            (2, LAYOUTS["pipeline"]),
            (2, {"parallel.context": 2}),
            (2, {"parallel.context": 2, "parallel.context_mode": "all-to-all"}),
            (4, {"parallel.tensor": 4, "parallel.tensor_mode": "2d"}),
            (8, {"parallel.tensor": 8, "parallel.tensor_mode": "2.5d"}),
            (8, {"parallel.tensor": 8, "parallel.tensor_mode": "3d"}),
        )
    ),
]


@pytest.mark.parametrize(("size", "changes"), COMPILED, ids=str)
def test_a_compiled_step_is_the_eager_one(runs, tiny, tiny_alone, size, changes):
    config = changed(tiny, changes, {"train.compile": True})
    run = runs.train(config, size)
    assert run.events("start")[0]["compiled"]
    assert curve(run) == pytest.approx(curve(tiny_alone), rel=ROUNDING)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--nproc", "3", "--parallel.pipeline", "2"],
            ["parallel.pipeline=2 needs a multiple of 2", "there are 3", "start 2 or 4"],
        ),
        (["--parallel.tensor", "2"], ["there is 1", "--nproc 2", "--parallel.tensor 1"]),
        (
            ["--nproc", "3", "--train.batch-size", "16"],
            ["parallel.data=3 must divide the 16 sequences", "1, 2, 4", "15 or 18"],
        ),
        (
            ["--nproc", "2", "--train.micro-batch-size", "3"],
            ["train.micro_batch_size=3 must divide the 8 sequences", "nearest possible: 1, 2, 4"],
        ),
        (
            ["--nproc", "3", "--parallel.tensor", "3", "--train.batch-size", "6"],
            ["parallel.tensor=3 must divide model.attention.n_heads=2", "possible: 1, 2"],
        ),
        (
            ["--nproc", "4", "--parallel.pipeline", "4"],
            ["parallel.pipeline=4 makes 4 stages of model.n_layers=2", "at most 2"],
        ),
        (
            ["--nproc", "2", "--parallel.pipeline", "2", "--train.micro-batch-size", "16"],
            ["schedule='1f1b' over parallel.pipeline=2", "there are 1", "'gpipe'"],
        ),
        (
            ["--nproc", "2", "--parallel.pipeline", "2", "--parallel.schedule", "zero-bubble",
             "--train.batch-size", "10", "--train.micro-batch-size", "2"],
            ["'zero-bubble' takes 5 micro-batches in 2 equal rounds", "parallel.pipeline=2"],
        ),
        (
            ["--nproc", "2", "--parallel.tensor", "2", "--parallel.sequence", "true",
             "--model.context-length", "17"],
            ["parallel.sequence=true over parallel.tensor=2", "model.context_length", "16 or 18"],
        ),
        (["--parallel.virtual-stages", "2"], ["virtual_stages=2 needs parallel.schedule"]),
        (["--parallel.replicate", "2"], ["parallel.zero shares"]),
        (["--train.offload", "true"], ["set it to 1, 2 or 3"]),
        (
            ["--nproc", "2", "--parallel.pipeline", "2", "--parallel.schedule", "zero-bubble",
             "--train.activation-checkpoint", "full"],
            ["'full'", "schedule='zero-bubble' splits it into many", "leave it out"],
        ),
        (
            ["--nproc", "2", "--parallel.pipeline", "2", "--parallel.schedule", "zero-bubble",
             "--train.compile", "true", "--dry-run"],
            ["train.compile=true", "'zero-bubble' splits the backward", "set it to 'auto'"],
        ),
        (
            ["--nproc", "4", "--parallel.pipeline", "2", "--parallel.schedule", "zero-bubble-v",
             "--parallel.virtual-stages", "2", "--parallel.zero", "1", "--model.n-layers", "4"],
            ["parallel.schedule='zero-bubble-v' holds the embedding and the tied head"],
        ),
        (
            ["--nproc", "2", "--parallel.pipeline", "2", "--parallel.schedule", "zero-bubble-v",
             "--parallel.virtual-stages", "3"],
            ["'zero-bubble-v' has two stages a process", "virtual_stages to 2 instead of 3"],
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_can(capsys, tmp_path, options, says):
    start = ["train", "grammar", "--model.vocab-size", "16", "--run-dir", str(tmp_path / "run")]
    assert main([*start, *options]) == 2
    said = capsys.readouterr().err
    assert said.count("pentameter: ") == 1
    for words in says:
        assert words in said
    assert not (tmp_path / "run").exists()
