"""A mixture of experts goes on from one degree of experts to another."""

import pytest

from trials.layout_runs import changed

ROUNDING = 1e-9
TINY = {
    "name": "tiny",
    "model.vocab_size": 16,
    "model.context_length": 16,
    "model.n_layers": 2,
    "model.attention.n_heads": 2,
    "model.d_model": 16,
    "model.dropout": 0.1,
    "model.experts.count": 4,
    "model.experts.width": 8,
    "model.router.balance": "bias",
    "model.router.balance_rate": 0.05,
    "data.grammar.n_characters": 4000,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
    "train.batch_size": 8,
    "train.micro_batch_size": 2,
    "train.eval_interval": 2,
    "train.precision": "fp64",
    "train.compile": False,
    "checkpoint.interval": 2,
    "log.interval": 1,
}
DEGREES = (
    (4, {"parallel.expert": 4, "parallel.zero": 1}),
    (4, {"parallel.tensor": 2, "parallel.expert": 2, "parallel.expert_tensor": 2}),
    (2, {"parallel.expert": 2}),
    (1, {}),
)
"""Processes and layout of each quarter of the run."""


@pytest.mark.slow
def test_a_run_goes_on_from_degree_to_degree(runs):
    """Training, evaluation and checkpoints, each layout opening the one before's."""
    tiny = changed("grammar", TINY)
    alone = runs.train(changed(tiny, {"train.steps": 8}))
    folder = runs.new_folder()
    for quarter, (size, layout) in enumerate(DEGREES):
        steps = {"train.steps": 2 * (quarter + 1)}
        run = runs.train(changed(tiny, layout, steps), size, folder=folder)
        assert (run.end.step, run.end.reason) == (2 * (quarter + 1), "completed")
    for kind, keys in (("train", ("loss", "grad_norm")), ("eval", ("loss",))):
        for key in keys:
            assert run.numbers(key, kind) == pytest.approx(alone.numbers(key, kind), rel=ROUNDING)
    ours, theirs = run.tensors(8), alone.tensors(8)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if "qkv.bias" not in name:  # a key's bias has no gradient but rounding
            scale = max(1e-9, float(theirs[name].double().abs().max()))
            assert float((tensor - theirs[name]).double().abs().max()) / scale < ROUNDING, name
