"""Fine-tuning: a run that begins with another model's weights, and continues as itself."""

import json

import pytest
import torch

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.cli.main import main
from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.train.loop import Trainer


def config(**sections) -> Config:
    base = {
        "model": {"context_length": 16, "n_layers": 1, "n_heads": 2, "d_model": 16},
        "data": {"corpus": "grammar", "grammar": {"n_characters": 3000}},
        "optimizer": {"learning_rate": 1e-2},
        "train": {"steps": 12, "batch_size": 4, "eval_interval": 6, "precision": "fp32"},
        "log": {"interval": 1},
    }
    for name, section in sections.items():
        base[name] = {**base[name], **section}
    return Config.model_validate(base)


def events(run, kind):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["event"] == kind]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    run = tmp_path_factory.mktemp("base") / "run"
    Trainer(config(), run_dir=run, quiet=True).fit()
    return run


def test_a_fine_tuned_run_begins_where_the_model_ended(base, tmp_path):
    run = tmp_path / "tuned"
    asked = config(train={"steps": 4}, optimizer={"learning_rate": 1e-6})
    Trainer(asked, run_dir=run, init_from=base, quiet=True).fit()
    last = min(events(base, "eval"), key=lambda e: e["loss"])  # a run stands for its best
    record = json.loads((run / "plan.json").read_text())["init_from"]
    assert record["step"] == last["step"]
    assert record["tokens"] == last["step"] * 4 * 16
    assert events(run, "eval")[0]["loss"] == pytest.approx(last["loss"], rel=1e-6)
    ours, theirs = load_model(run).model.state_dict(), load_model(base).model.state_dict()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-4)


def test_the_tokenizer_of_a_model_that_was_moved_is_found(base, tmp_path):
    (model,) = (base / "checkpoints").glob("step-*12")
    gone = tmp_path / "gone" / "tokenizer.json"  # which config.toml of an imported model names
    asked = config(train={"steps": 2}, data={"tokenizer": str(gone)})
    for _ in range(2):  # the same call continues
        Trainer(asked, run_dir=tmp_path / "run", init_from=model, quiet=True).fit()
    said = (tmp_path / "run" / "log.txt").read_text()
    assert f"warning: {gone} is not there; taking {model / 'tokenizer.json'}\n" in said


def test_the_model_it_began_with_can_stay_the_best(base, tmp_path):
    asked = config(train={"steps": 2, "eval_interval": 1}, optimizer={"learning_rate": 1.0})
    Trainer(asked, run_dir=tmp_path / "run", init_from=base, quiet=True).fit()
    assert [e["best"] for e in events(tmp_path / "run", "eval")] == [True, False, False]
    assert load_model(tmp_path / "run").step == 0


def test_the_same_command_continues_and_another_is_refused(base, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"

    class StopEarly:
        def on_step(self, trainer, step):
            if step.step == 2:
                trainer.stop("enough")

    asked = config(optimizer={"learning_rate": 1e-3})
    Trainer(asked, run_dir=run, init_from=base, hooks=[StopEarly()], quiet=True).fit()
    record = json.loads((run / "plan.json").read_text())["init_from"]
    Trainer(asked, run_dir=run, init_from=base, quiet=True).fit()
    assert json.loads((run / "plan.json").read_text())["init_from"] == record
    Trainer(asked, run_dir=whole, init_from=base, quiet=True).fit()
    assert [e["loss"] for e in events(run, "train")] == [e["loss"] for e in events(whole, "train")]
    with pytest.raises(ConfigError, match="began with the weights of"):
        Trainer(asked, run_dir=run, quiet=True).fit()
    with pytest.raises(ConfigError, match="began with random weights"):
        Trainer(config(), run_dir=base, init_from=run, quiet=True).fit()
    checkpoint = str(base / "checkpoints" / "step-00000012")
    with pytest.raises(ConfigError, match="both say where the weights come from"):
        Trainer(asked, run_dir=run, init_from=base, resume=checkpoint, quiet=True).fit()


def test_another_architecture_is_refused_before_a_folder_exists(base, tmp_path):
    asked = config(model={"n_layers": 2, "activation": "relu"})
    with pytest.raises(ConfigError, match=r"n_layers: 1 there, 2 here.*activation: 'gelu' there"):
        Trainer(asked, run_dir=tmp_path / "run", init_from=base, quiet=True).fit()
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_run_that_died_in_its_first_save_begins_with_the_model_again(base, tmp_path):
    run = tmp_path / "run"
    asked = config(optimizer={"learning_rate": 1e-6})

    class Die:
        def on_start(self, trainer):
            raise RuntimeError("as if killed")

    with pytest.raises(RuntimeError, match="as if killed"):
        Trainer(asked, run_dir=run, init_from=base, hooks=[Die()], quiet=True).fit()
    (run / "checkpoints" / "step-00000000.tmp-0123456789abcdef").mkdir()
    Trainer(asked, run_dir=run, init_from=base, quiet=True).fit()
    best = min(events(base, "eval"), key=lambda e: e["loss"])
    assert events(run, "eval")[0]["loss"] == pytest.approx(best["loss"], rel=1e-6)


def test_a_model_alone_is_no_run_to_resume(base, tmp_path):
    assert main(["export", str(base), "--to", "safetensors", "--out", str(tmp_path / "out")]) == 0
    with pytest.raises(ConfigError, match="begin one with its weights: --init-from"):
        Trainer(config(), run_dir=tmp_path / "run", resume=str(tmp_path / "out")).fit()
