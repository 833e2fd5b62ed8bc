"""Parts of a run that are the user's: the model, the optimizer, the batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import config, events
from torch import nn

import pentameter as pm
from pentameter.checkpoint.folders.load_model import load_model
from pentameter.errors import ConfigError
from pentameter.generation.loop import generate
from pentameter.train.loop import Trainer
from pentameter.train.user_components import CustomBatches

T = 16  # of tiny_runs


class Words(nn.Module):
    """Each token's logits from itself, some of it dropped in training."""

    def __init__(self, model):
        super().__init__()
        self.embedding = nn.Embedding(model.vocab_size, model.d_model)
        self.blocks = nn.ModuleList([nn.Linear(model.d_model, model.d_model)])
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(model.d_model, model.vocab_size)

    def forward(self, tokens):
        return self.head(self.dropout(torch.relu(self.blocks[0](self.embedding(tokens)))))


class Masked(Words):
    """With a causal mask of infinities, as `nn.Transformer` makes it, in a buffer."""

    def __init__(self, model):
        super().__init__(model)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(T))

    def forward(self, tokens):
        logits = super().forward(tokens)
        return self.mask[: tokens.shape[1], : tokens.shape[1]].softmax(-1) @ logits


class NeedsTargets(Words):
    def forward(self, tokens, targets):
        logits = super().forward(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(
            logits, targets.flatten(), ignore_index=-1, reduction="sum"
        )


def build(config):
    return Words(config.model)


def build_with_loss(config):
    return NeedsTargets(config.model)


def optimizer(groups):
    return torch.optim.NAdam(groups)  # whose state has numbers beside the moments


def batches(step, rows):
    """Rows that count up from where their number and the step say."""
    starts = (np.asarray(rows)[:, None] + 5 * step) % 11
    text = (starts + np.arange(T + 1)) % 11
    return torch.from_numpy(text[:, :-1]), text[:, 1:]


OWN = {"model": build, "optimizer": optimizer, "batches": batches}


def fit(run_dir, steps=12, hooks=(), resume="auto", **own):
    settings = config(train={"steps": steps, "sample_interval": 6, "sample_tokens": 8})
    trainer = Trainer(settings, run_dir=run_dir, quiet=True, hooks=hooks, resume=resume, **own)
    end = trainer.fit()
    return trainer.run, end


def losses(run_dir):
    return [event["loss"] for event in events(run_dir, "train")]


class StopAt:
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, step):
        if step.step == self.step:
            trainer.stop("here")


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.engine.named_parameters()}


def test_a_run_of_parts_of_one_s_own_learns_samples_and_is_reported(tmp_path):
    from pentameter.report.pages.page import write_report

    trainer, end = fit(tmp_path / "run", **OWN)
    assert (end.step, end.reason) == (12, "completed")
    assert isinstance(trainer.optimizer, torch.optim.NAdam)
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] - 0.3
    assert len(events(tmp_path / "run", "eval")) == 4
    assert (tmp_path / "run" / "samples" / "step-00000012.txt").read_text()
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["model"]["parameters"] == sum(p.numel() for p in trainer.engine.parameters())
    assert plan["model"]["built_by"] == "test_supplied.py:build"
    assert plan["memory"]["weights_bytes"] == 4 * plan["model"]["parameters"]
    assert plan["time"] == {"bubble_fraction": 0.0}
    write_report(tmp_path / "run")
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path):
    whole, _ = fit(tmp_path / "whole", **OWN)
    fit(tmp_path / "run", hooks=[StopAt(5)], **OWN)
    resumed, _ = fit(tmp_path / "run", **OWN)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())


def test_a_trained_module_is_loaded_with_its_function(tmp_path):
    trainer, _ = fit(tmp_path, model=build)
    loaded = load_model(tmp_path / "checkpoints" / "step-00000012", model=build)
    assert type(loaded.model) is Words
    assert not loaded.model.training
    assert torch.equal(loaded.model.head.weight, trainer.engine.model.head.weight)
    text = generate(loaded.model, loaded.tokenizer, "ab", max_new_tokens=20, context_length=T)
    assert len(text[0]) == 20
    with pytest.raises(ConfigError, match="context_length is not given"):
        generate(loaded.model, loaded.tokenizer, "ab")
    with pytest.raises(ConfigError, match=r"test_supplied.py:build built.*pm.load_model"):
        load_model(tmp_path)


def test_adapters_of_a_module_are_merged_when_it_is_loaded(tmp_path):
    source = pm.OwnModel(build, blocks="blocks.*")
    settings = config(lora={"rank": 2}, train={"sample_interval": None})
    trainer = Trainer(settings, run_dir=tmp_path, quiet=True, model=source)
    trainer.fit()
    run = trainer.run
    assert run.plan.n_parameters == sum(p.numel() for p in Words(run.config.model).parameters())
    trained = run.engine.model.eval()
    assert trained.blocks[0].lora_b.any()
    loaded = load_model(tmp_path / "checkpoints" / "step-00000012", model=source).model
    assert not torch.equal(loaded.blocks[0].weight, trained.blocks[0].weight)
    tokens = torch.arange(T)[None] % 5
    # One matrix, or two products: fp32 in another order.
    torch.testing.assert_close(loaded(tokens), trained(tokens), rtol=0, atol=1e-5)


def test_a_mask_of_infinities_is_saved_and_loaded(tmp_path):
    build_masked = lambda config: Masked(config.model)  # noqa: E731
    fit(tmp_path, hooks=[StopAt(6)], model=build_masked)
    trainer, end = fit(tmp_path, model=build_masked)
    assert end.step == 12
    assert trainer.engine.model.mask.isinf().any()
    loaded = load_model(tmp_path, model=build_masked)
    assert torch.equal(loaded.model.mask, Masked(trainer.config.model).mask)


def test_a_module_that_returns_the_mean_of_its_losses_is_told_of_before_the_first_step(tmp_path):
    class Mean(NeedsTargets):
        def forward(self, tokens, targets):
            return super().forward(tokens, targets) / targets.numel()

    fit(tmp_path / "mean", steps=1, model=lambda config: Mean(config.model))
    fit(tmp_path / "sum", steps=1, model=build_with_loss)
    mean, total = ((tmp_path / name / "log.txt").read_text() for name in ("mean", "sum"))
    assert "is to return the sum of its tokens' losses" in mean
    assert "is to return the sum" not in total


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda logits, loss: (logits, loss), r"returned tuple, .* the summed loss, 0-dim, alone"),
        (lambda logits, loss: {"loss": loss}, "returned dict, called with inputs and targets"),
    ],
)
def test_a_module_that_returns_more_than_its_loss_is_refused(tmp_path, returned, said):
    class Several(NeedsTargets):
        def forward(self, tokens, targets):
            return returned(None, super().forward(tokens, targets))

    with pytest.raises(ConfigError, match=said):
        fit(tmp_path, model=lambda config: Several(config.model))


def test_without_logits_nothing_is_sampled(tmp_path):
    fit(tmp_path, model=build_with_loss)
    assert "nothing is sampled" in (tmp_path / "log.txt").read_text()
    assert list((tmp_path / "samples").iterdir()) == []
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


def test_the_built_in_model_takes_one_s_own_optimizer_and_batches(tmp_path):
    fit(tmp_path, hooks=[StopAt(5)], optimizer=optimizer, batches=batches)
    _, end = fit(tmp_path, optimizer=optimizer, batches=batches)
    assert end.step == 12
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


def test_the_built_in_model_takes_a_loss_around_it(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "own-model.md"
    code = page.read_text().split("is a module around it:\n\n```python\n")[1]
    names = {"torch": torch}
    exec(code.split("\npm.Trainer")[0], names)
    smoothed, _ = fit(tmp_path / "smoothed", model=names["Smoothed"])
    plain, _ = fit(tmp_path / "plain")
    assert smoothed.plan.n_parameters == plain.plan.n_parameters
    assert losses(tmp_path / "smoothed")[-1] > losses(tmp_path / "plain")[-1]


@pytest.mark.parametrize("missing", OWN)
def test_a_run_is_not_continued_without_its_parts(tmp_path, missing):
    fit(tmp_path, hooks=[StopAt(2)], **OWN)
    rest = {name: part for name, part in OWN.items() if name != missing}
    with pytest.raises(ConfigError, match=f"give Trainer the same {missing}="):
        fit(tmp_path, **rest)


def test_weights_of_another_kind_are_not_taken(tmp_path):
    fit(tmp_path / "gpt", steps=2)
    with pytest.raises(ConfigError, match="holds the built-in model"):
        load_model(tmp_path / "gpt", model=build)
    with pytest.raises(ConfigError, match="a module of your own begins with"):
        Trainer(config(), init_from=tmp_path / "gpt", model=build)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda step, rows: None, "returned NoneType"),
        (lambda step, rows: (np.zeros((3, T)), np.zeros((3, T), int)), "inputs of float64"),
        (lambda step, rows: (np.zeros((3, T), int), np.zeros((2, T), int)), r"shape \(2, 16\)"),
        (lambda step, rows: (np.full((3, T), -1), np.zeros((3, T), int)), "outside 0 … 8"),
        (lambda step, rows: (np.zeros((3, T), int), np.full((3, T), 9)), "outside -1 … 8"),
    ],
)
def test_what_is_no_batch_is_refused(made, said):
    own = CustomBatches(made, config(), vocab_size=9)
    with pytest.raises(ConfigError, match=said):
        own.batch(0, np.arange(3))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (({"x": np.zeros((3, 4))}, np.zeros(2, int)), r"targets of shape \(2,\); .* the 3 rows"),
        (([np.zeros((1, 3))], np.zeros(3, int)), r"inputs\[0\] of shape \(1, 3\)"),
        (({"x": np.zeros(3)}, np.zeros(3)), "give pm.OwnModel a `count_targets`"),
        (({"x": torch.zeros(3, dtype=torch.bfloat16)}, np.zeros(3, int)), "no array on the CPU"),
        ((np.array(["a", "b", "c"]), np.zeros(3, int)), "inputs of <U1"),
    ],
)
def test_what_no_model_takes_is_refused(made, said):
    source = pm.OwnModel(build)
    own = CustomBatches(lambda step, rows: made, config(), vocab_size=9, source=source)
    with pytest.raises(ConfigError, match=said):
        own.batch(0, np.arange(3))


class Pictures(nn.Module):
    """Two classes of images of 4 × 4."""

    def __init__(self, config):
        super().__init__()
        self.head = nn.Linear(16, 2)

    def forward(self, images):
        return self.head(images.flatten(1))


def pictures(step, rows):
    labels = (np.asarray(rows) + step) % 2
    return {"tensor": labels[:, None, None] + np.zeros((4, 4), np.float32)}["tensor"], labels


def test_images_are_trained_on_and_no_text_is_evaluated(tmp_path):
    fit(tmp_path, model=Pictures, batches=pictures)
    found = losses(tmp_path)
    assert found[0] == pytest.approx(np.log(2), abs=0.5)
    assert found[-1] < found[0] - 0.05
    assert events(tmp_path, "train")[-1]["loss_tokens"] == 12 * 4  # labels
    assert events(tmp_path, "eval") == []
    assert not list((tmp_path / "samples").glob("*"))
    assert "something else than tokens" in (tmp_path / "log.txt").read_text()


def test_what_is_no_optimizer_of_the_groups_is_refused(tmp_path):
    with pytest.raises(TypeError, match="it returned list"):
        fit(tmp_path / "a", optimizer=lambda groups: groups)
    alone = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(TypeError, match="is to hold those of its groups"):
        fit(tmp_path / "b", optimizer=lambda groups: torch.optim.SGD(alone))


def test_the_names_of_the_package_are_these():
    assert pm.OwnModel(build).blocks == ()
    assert callable(pm.verify_model)
