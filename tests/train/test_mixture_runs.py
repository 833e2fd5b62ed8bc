"""Runs on a blend of data sets: they go on exactly, and say what they read."""

import functools
import json

import pytest
from tiny_runs import config, events, fit, seal

from pentameter.data.batches.step import training_batches
from pentameter.data.open_dataset import open_dataset
from pentameter.errors import ConfigError
from pentameter.planning.layouts.layout import Layout
from pentameter.record.run_data import open_run_data
from pentameter.verify.data import chosen_steps, verify_data


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "chat.jsonl"
    records = [{"prompt": f"{'abcd' * n}", "completion": "efgh" * n} for n in range(1, 9)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    sources = [{"corpus": "grammar", "weight": 0.25}, {"path": str(file), "weight": 0.75}]
    return {
        "data": {"corpus": None, "sources": sources, "order": "documents", "packing": True},
        "schedule": {"name": "constant"},
    }


def test_a_blended_run_goes_on_exactly(sections, tmp_path):
    with_steps = {**sections, "train": {"steps": 4}}
    fit(tmp_path / "parts", sections=with_steps)
    fit(tmp_path / "parts", sections=sections)
    trainer, _ = fit(tmp_path / "whole", sections=sections)
    losses = [[e["loss"] for e in events(tmp_path / n, "train")] for n in ("parts", "whole")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12
    log = (tmp_path / "whole" / "log.txt").read_text()
    assert "a blend of 2" in log
    assert "25.0% grammar · train 2,700" in log
    assert (
        trainer.batches.mixture.passes(48)[1]
        == 36 / trainer.batches.mixture.orders[1].rows_per_epoch
    )
    assert all(e["split"] == "val" for e in events(tmp_path / "whole", "eval"))
    changed = [{**source, "weight": 0.5} for source in sections["data"]["sources"]]
    with pytest.raises(ConfigError, match=r"data\.sources"):
        fit(
            tmp_path / "whole",
            sections={**sections, "data": {**sections["data"], "sources": changed}},
        )


def test_a_run_that_drew_its_sources_alike_goes_on_so(sections, tmp_path, monkeypatch):
    """It was begun by a version that had one key for all of them."""
    earlier = functools.partial(training_batches, own_keys=False)
    with monkeypatch.context() as patched:
        patched.setattr("pentameter.train.start.training_batches", earlier)
        for name, steps in (("whole", 12), ("parts", 4)):
            fit(tmp_path / name, sections={**sections, "train": {"steps": steps}})
    seal(tmp_path / "parts" / "checkpoints" / "step-00000004", own_keys="absent")
    for steps in (8, 12):  # what it saves now says so, too
        fit(tmp_path / "parts", sections={**sections, "train": {"steps": steps}})
    fit(tmp_path / "new", sections=sections)
    losses = [[e["loss"] for e in events(tmp_path / n, "train")] for n in ("parts", "whole", "new")]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    shown = open_run_data(tmp_path / "parts").batches.batch(10)
    assert shown.hash() != open_run_data(tmp_path / "new").batches.batch(10).hash()


def test_layouts_read_the_same_blend(sections):
    settings = config(**sections)
    batches = training_batches(settings, open_dataset(settings.data).split("train"))
    steps = chosen_steps(batches, 4, 2)
    outcomes = list(verify_data(batches, 4, [Layout(data=2), Layout(data=4)], steps))
    assert [outcome.problem for outcome in outcomes] == [None] * 3
    assert len({outcome.hash for outcome in outcomes}) == 1
