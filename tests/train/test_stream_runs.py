"""Runs on a text that is tokenized meanwhile: the same as on one that is ready, and resumed."""

import json

import numpy as np
import pytest
from tiny_runs import config, events, fit

from pentameter.data.batches.step import training_batches
from pentameter.data.open_dataset import open_dataset
from pentameter.data.prepare import background, encoders
from pentameter.data.prepare import token_stream_writer as preparing_stream
from pentameter.data.shards import token_stream as stream_shards
from pentameter.errors import ConfigError, CorruptError
from pentameter.planning.layouts.layout import Layout
from pentameter.verify.data import verify_data

DAMAGED = '{"text": \n'


class InThisProcess:
    """Stands for `Ahead`: writes the next part when somebody waits."""

    n_written = 0

    def __init__(self, origin, folder):
        self.parts = preparing_stream.Parts(origin, folder)

    def prepare(self, n_tokens):
        pass

    def wait(self, n_tokens):
        InThisProcess.n_written += self.parts.write_next()

    def close(self):
        pass


@pytest.fixture
def sections(tmp_path, monkeypatch):
    """Blocks of 128 tokens, two steps; a run reads six, and then the text from the start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(background, "Ahead", InThisProcess)
    monkeypatch.setattr(stream_shards, "BLOCK_TOKENS", 128)
    monkeypatch.setattr(preparing_stream, "FIRST_TOKENS", 129)
    monkeypatch.setattr(preparing_stream, "LARGEST_TOKENS", 129)
    monkeypatch.setattr(encoders, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr(preparing_stream, "LEARNED_BYTES", 500)
    InThisProcess.n_written = 0
    write(tmp_path)
    data = {"path": str(tmp_path / "text"), "tokenizer": "word", "order": "streamed"}
    return {"data": {"corpus": None, "grammar": {}, **data}, "schedule": {"name": "constant"}}


def write(tmp_path, damaged_at=None, seed=0):
    folder = tmp_path / "text"
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    words = np.array([f"w{n}" for n in range(40)])
    for n in range(3):
        texts = [" ".join(rng.choice(words, 20).tolist()) for _ in range(12)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        lines[5] = DAMAGED if n == damaged_at else lines[5]
        (folder / f"{n}.jsonl").write_text("".join(lines))


def losses(folder):
    return [event["loss"] for event in events(folder, "train")]


def test_a_run_is_the_same_whenever_its_text_is_ready(sections, tmp_path, monkeypatch):
    run, _ = fit(tmp_path / "ahead", sections=sections)
    n_parts = InThisProcess.n_written
    assert n_parts > 3
    assert run.plan.rows_per_epoch is None
    assert "more is tokenized meanwhile" in (tmp_path / "ahead" / "log.txt").read_text()
    assert {event["split"] for event in events(tmp_path / "ahead", "eval")} == {"val"}
    fit(tmp_path / "ready", sections=sections)
    assert InThisProcess.n_written == n_parts
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other cache"))
    fit(tmp_path / "resumed", sections={**sections, "train": {"steps": 3}})
    assert InThisProcess.n_written < 2 * n_parts
    fit(tmp_path / "resumed", sections=sections)
    assert losses(tmp_path / "ahead") == losses(tmp_path / "ready") == losses(tmp_path / "resumed")
    assert len(losses(tmp_path / "ahead")) == 12


def test_a_damaged_file_ends_the_run_and_the_mended_one_goes_on(sections, tmp_path):
    sections["checkpoint"] = {"interval": 2}
    write(tmp_path, damaged_at=2)
    with pytest.raises(CorruptError, match=r"2\.jsonl, line 6 is not JSON"):
        fit(tmp_path / "run", sections=sections)
    saved = len(losses(tmp_path / "run"))
    assert saved >= 4
    assert sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    write(tmp_path)
    fit(tmp_path / "run", sections=sections)
    fit(tmp_path / "whole", sections=sections)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    write(tmp_path, seed=1)
    with pytest.raises(ConfigError, match="the data has changed since step 12"):
        fit(tmp_path / "run", sections=sections)


def test_what_counts_in_epochs_is_refused(sections, tmp_path):
    with pytest.raises(ConfigError, match=r"train\.epochs counts in epochs, and how long"):
        fit(tmp_path / "run", sections={**sections, "train": {"steps": None, "epochs": 1}})


def test_layouts_read_the_same_stream(sections):
    settings = config(**sections)
    batches = training_batches(settings, open_dataset(settings.data).split("train"))
    outcomes = list(verify_data(batches, 4, [Layout(data=2), Layout(data=4)], [0, 1, 7, 12]))
    assert [outcome.problem for outcome in outcomes] == [None] * 3
    assert len({outcome.hash for outcome in outcomes}) == 1
