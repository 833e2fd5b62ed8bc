"""A graph that the compiler makes wrong of a whole model is not used."""

import json

import numpy as np
import pytest
from torch import nn

from pentameter.config.files.load import load_config
from pentameter.train.loop import Trainer

TINY = {
    "train.steps": 2, "train.batch_size": 2, "train.precision": "fp32", "train.device": "cpu",
    "train.eval_interval": "none", "log.interval": 1, "model.n_layers": 1, "model.d_model": 16,
    "model.attention.n_heads": 2, "model.context_length": 16,
    "model.feed_forward.activation": "relu",
    "model.attention.sliding_window": 8,  # which the fused step does not know
    "data.max_bytes": 20_000, "data.validation_fraction": 0.1,
}  # fmt: skip


def losses(run_dir, **more):
    trainer = Trainer(load_config("quickstart", TINY | more), run_dir=run_dir, quiet=True)
    trainer.fit()
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return trainer, [line["loss"] for line in lines if line["event"] == "train"]


@pytest.mark.usefixtures("short_measurement")
def test_a_wrong_graph_is_told_and_left(tmp_path):
    from torch._inductor import config

    with config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        trainer, found = losses(tmp_path / "compiled", **{"train.compile": True})
    assert not trainer.run.engine.stage_modules[0].has_graph
    assert "so this run is not compiled" in (tmp_path / "compiled" / "log.txt").read_text()
    _, expected = losses(tmp_path / "eager", **{"train.compile": False})
    assert found == pytest.approx(expected, rel=1e-6)  # the loss's kernel is compiled on its own


@pytest.mark.usefixtures("short_measurement")
def test_a_graph_that_cannot_be_made_is_told_and_the_run_goes_on_without(tmp_path):
    from torch._inductor import config

    with config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "compile_error"}):
        trainer, found = losses(tmp_path / "compiled", **{"train.compile": True})
    assert not trainer.run.engine.stage_modules[0].has_graph
    log = (tmp_path / "compiled" / "log.txt").read_text()
    assert "torch.compile cannot make a graph of the model (" in log
    assert "so this run is not compiled" in log
    _, expected = losses(tmp_path / "eager", **{"train.compile": False})
    assert found == pytest.approx(expected, rel=1e-6)


class Normed(nn.Module):
    """A model with a bias before batch norm, whose gradient is 0 but for rounding."""

    def __init__(self, model):
        super().__init__()
        self.embedding = nn.Embedding(model.vocab_size, model.d_model)
        self.linear = nn.Linear(model.d_model, model.d_model)
        self.norm = nn.BatchNorm1d(model.d_model)
        self.head = nn.Linear(model.d_model, model.vocab_size)

    def forward(self, tokens):
        x = self.linear(self.embedding(tokens)).transpose(1, 2)
        return self.head(self.norm(x).transpose(1, 2).sigmoid())


def build(config):
    return Normed(config.model)


def batches(step, rows):
    if step >= 2:
        raise IndexError(f"there is no batch for step {step}")
    made = (np.arange(17) * (rows[:, None] + step + 1)) % 11
    return made[:, :-1], made[:, 1:]


@pytest.mark.usefixtures("short_measurement")
def test_a_gradient_that_is_rounding_alone_is_no_wrong_graph(tmp_path):
    settings = load_config(
        "quickstart", TINY | {"train.compile": True, "model.attention.sliding_window": "none"}
    )
    for _ in range(2):  # the second finds the run complete, and asks for no batch beyond it
        trainer = Trainer(settings, run_dir=tmp_path, quiet=True, model=build, batches=batches)
        assert trainer.fit().step == 2
        assert trainer.run.engine.stage_modules[0].has_graph
