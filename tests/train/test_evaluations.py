"""What a run is evaluated on beside validation, and the test split at its end."""

import json

import numpy as np
import pytest
from tiny_runs import config, events, fit

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.cli.main import main
from pentameter.data.open_dataset import open_dataset
from pentameter.errors import ConfigError, StorageError
from pentameter.evaluate.split import evaluate
from pentameter.parallel.assemble import engine_of
from pentameter.planning.plan import make_plan

LETTERS = "abcdefghijklmnop"
NONE = {"evaluations": ()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "more.txt").write_text(LETTERS * 9)
    record = {"prompt": "abc", "completion": "defg"}
    (folder / "chat.jsonl").write_text(f"{json.dumps(record)}\n" * 5)
    draw = np.random.default_rng(7)
    with (folder / "questions.jsonl").open("w") as file:
        for _ in range(9):  # of which some are longer than the context
            words = ["".join(draw.choice(list(LETTERS), draw.integers(2, 12))) for _ in range(4)]
            question = {"context": words[0], "choices": words[1:], "answer": 1}
            file.write(f"{json.dumps(question)}\n")
    return folder


def sections(files, **train):
    named = [
        {"name": n, "path": str(files / f)} for n, f in (("more", "more.txt"), ("qa", "chat.jsonl"))
    ]
    named.insert(1, {"name": "quiz", "multiple_choice": str(files / "questions.jsonl")})
    return {
        "data": {
            "grammar": {"n_characters": 3000, "alphabet": f"{LETTERS} "},
            "evaluations": named,
            "test_fraction": 0.1,
        },
        "train": {"eval_train_tokens": 200, **train},
    }


def spoils(step):
    """A learning rate with which the last step is not the best."""
    return 1e-2 if step < 8 else 1.0


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    trainer, end = fit(folder, sections=sections(files), schedule=spoils)
    assert end.reason == "completed"
    return folder, trainer


def test_every_evaluation_has_its_events(files, run):
    folder, trainer = run
    found = [(e["step"], e["split"]) for e in events(folder, "eval")]
    names = ["val", "train", "more", "quiz", "qa"]
    best = trainer.state.best_step
    assert best not in (None, 0, 12), "the test is to tell the best from the last"
    assert found == [*((step, name) for step in (0, 4, 8, 12) for name in names), (best, "test")]
    assert {e["split"] for e in events(folder, "eval") if e["best"]} == {"val"}
    tokens = {e["split"]: e["tokens"] for e in events(folder, "eval")}
    n_right = tokens.pop("quiz")
    assert tokens == {"val": 299, "train": 199, "more": 143, "qa": 20, "test": 299}
    lines = (files / "questions.jsonl").read_text().splitlines()
    assert n_right == sum(1 + len(json.loads(line)["choices"][1]) for line in lines)


def test_questions_give_the_numbers_of_eval(files, run, capsys):
    folder, _ = run
    (event,) = (e for e in events(folder, "eval") if (e["step"], e["split"]) == (12, "quiz"))
    checkpoint = max((folder / "checkpoints").iterdir())
    questions = str(files / "questions.jsonl")
    assert main(["eval", str(checkpoint), "--multiple-choice", questions, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["examples"] == 9
    for name in ("step", "loss", "perplexity", "bits_per_byte", "tokens", "examples"):
        assert event[name] == pytest.approx(alone[name], rel=1e-5)  # fp32, rows grouped otherwise
    for name in ("accuracy", "accuracy_per_token", "accuracy_per_byte"):
        assert 0 < event[name] < 1
        assert event[name] == alone[name]


def test_the_test_split_is_told_of_the_best_checkpoint(run):
    folder, trainer = run
    (event,) = (e for e in events(folder, "eval") if e["split"] == "test")
    loaded = load_model(folder)
    assert loaded.step == event["step"]
    plan = make_plan(trainer.config)
    metrics = evaluate(
        engine_of(loaded.model, plan, trainer.engine.device, "fp32"),
        trainer.dataset.split("test"),
        name="test",
        step=0,
        batch_size=8,
    )
    assert event["loss"] == pytest.approx(metrics.loss, rel=1e-6)  # sums of fp32, regrouped
    last = load_model(max((folder / "checkpoints").iterdir())).model.state_dict()
    for name, tensor in trainer.engine.model.state_dict().items():
        assert (tensor == last[name]).all(), "the run's own weights are the last ones again"


def test_after_a_failed_save_of_the_best_the_same_checkpoint_is_told_of_and_opened(
    files, tmp_path, monkeypatch
):
    """The test loss was that of the best checkpoint saved before, and `sample` opened the last."""
    chosen = sections(files)
    chosen["checkpoint"] = {"on_error": "warn", "keep_last": 1}
    real = CheckpointStore.plan

    def plan(self, contents, *arguments, **options):
        if contents.step == 8:
            raise StorageError("the disk is full")
        return real(self, contents, *arguments, **options)

    monkeypatch.setattr(CheckpointStore, "plan", plan)
    trainer, _ = fit(tmp_path / "run", sections=chosen, schedule=spoils)
    assert (trainer.state.best_step, trainer.state.saved_best_step) == (8, 4)
    (event,) = (e for e in events(tmp_path / "run", "eval") if e["split"] == "test")
    assert load_model(tmp_path / "run").step == event["step"] == 4


def test_a_complete_run_that_is_started_again_repeats_nothing(run, files):
    folder, _ = run
    before = [(e["step"], e["split"], e["loss"]) for e in events(folder, "eval")]
    fit(folder, sections=sections(files), schedule=spoils)
    assert [(e["step"], e["split"], e["loss"]) for e in events(folder, "eval")] == before


def test_evaluations_without_validation(files, tmp_path):
    chosen = sections(files, steps=4)
    chosen["data"] |= {"validation_fraction": 0.0, "test_fraction": 0.0}
    trainer, _ = fit(tmp_path / "run", sections=chosen)
    found = [(e["step"], e["split"]) for e in events(tmp_path / "run", "eval")]
    assert found == [(step, name) for step in (0, 4) for name in ("train", "more", "quiz", "qa")]
    assert trainer.state.best_step is None


def test_no_evaluation_at_all(files, tmp_path):
    fit(tmp_path / "run", sections=sections(files, eval_interval=None, steps=2))
    assert events(tmp_path / "run", "eval") == []


def test_too_few_tokens_are_refused_before_the_run(files, tmp_path):
    with pytest.raises(ConfigError, match="the evaluation 'train' has 1 tokens"):
        fit(tmp_path / "run", sections=sections(files, eval_train_tokens=1))
    assert not (tmp_path / "run").exists()


def test_the_texts_do_not_define_the_run(files):
    data = config(**sections(files)).data
    plain, named = (open_dataset(each) for each in (data.model_copy(update=NONE), data))
    assert plain.hash == named.hash
