"""The guard decides alike on every layout, and after a resume on another one."""

from __future__ import annotations

import random
from functools import partial

import pytest
from parity_hooks import OverflowInOne, StopInOne

from trials.layout_runs import Run, changed

ROUNDING = 1e-9
TINY = {
    "name": "tiny",
    "model.vocab_size": None,
    "model.context_length": 16,
    "model.n_layers": 2,
    "model.attention.n_heads": 2,
    "model.d_model": 16,
    "data.corpus": None,
    "data.tokenizer": "char",
    "data.order": "sequential",
    "data.validation_fraction": 0.0,
    "optimizer.learning_rate": 1e-2,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
    "schedule.min_learning_rate": 0.0,
    "train.steps": 40,
    "train.batch_size": 4,
    "train.micro_batch_size": 2,
    "train.eval_interval": None,
    "train.precision": "fp64",
    "train.compile": False,
    "checkpoint.interval": 40,
    "guard.spike_factor": 20.0,
    "guard.window": 16,
    "guard.skips": 1,
    "guard.rollback_interval": 10,
    "log.interval": 1,
}
LAYOUTS = {
    "data": {},
    "zero 3": {"parallel.zero": 3},
    "tensor": {"parallel.tensor": 2},
    "pipeline": {"parallel.pipeline": 2},
}
OVERFLOW = partial(OverflowInOne, steps=(36,))
SKIPPED, ROLLED_BACK = [31, 32, 33, 34, 37], [(32, 30), (34, 20)]


@pytest.fixture(scope="module")
def garbage(tmp_path_factory):
    """A configuration whose text is random signs in the steps 31 to 34, 64 tokens each."""
    drawn, text, words = random.Random(1), "", ["the", "cat", "sat", "on", "a", "mat"]
    while len(text) < 64 * 50:
        text += " ".join(drawn.choice(words) for _ in range(8)) + "\n"
    signs = "".join(drawn.choice("QXZJKVW#%&@!") for _ in range(64 * 4))
    path = tmp_path_factory.mktemp("garbage") / "text.txt"
    path.write_text(text[: 64 * 30] + signs + text[64 * 30 :])
    return changed("grammar", TINY, {"data.path": str(path)})


@pytest.fixture(scope="module")
def alone(runs, garbage):
    return runs.train(garbage, hook=OVERFLOW)


def said(run: Run) -> tuple[list[int], list[tuple[int, int]]]:
    rollbacks = zip(
        run.numbers("step", "rollback"), run.numbers("to_step", "rollback"), strict=True
    )
    return run.numbers("step", "skip"), [*rollbacks]


def check_alike(run: Run, alone: Run) -> None:
    assert said(alone) == (SKIPPED, ROLLED_BACK)
    assert said(run) == said(alone)
    assert run.numbers("step") == alone.numbers("step")
    assert run.numbers() == pytest.approx(alone.numbers(), abs=ROUNDING)
    mine, theirs = run.tensors(40), alone.tensors(40)
    for name, tensor in theirs.items():
        assert (mine[name] - tensor).abs().max() < ROUNDING, name


@pytest.mark.parametrize(
    "layout",
    [name if name == "data" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_every_layout_skips_and_rolls_back_alike(runs, garbage, alone, layout):
    run = runs.train(changed(garbage, LAYOUTS[layout]), 2, hook=OVERFLOW)
    check_alike(run, alone)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [30, 31, 33, 35])
def test_a_run_goes_on_inside_the_window_on_another_layout(runs, garbage, alone, stopped):
    begun = runs.train(garbage, 2, hook=partial(StopInOne, step=stopped))
    assert begun.end.step == stopped
    tensor = changed(garbage, LAYOUTS["tensor"])
    run = runs.train(tensor, 2, folder=begun.folder, hook=OVERFLOW)
    check_alike(run, alone)
