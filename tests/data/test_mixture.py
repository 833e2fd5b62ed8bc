"""Blends: each row's source and number, and the batches of several data sets."""

import json

import numpy as np
import pytest
from cache_of_a_folder import cache_of_a_test  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from pentameter.config.files.load import load_config
from pentameter.config.files.write import to_toml
from pentameter.config.schema import Config
from pentameter.data.batches.mixture import BLOCK_ROWS, Mixture, apportion
from pentameter.data.batches.step import training_batches
from pentameter.data.open_dataset import open_dataset
from pentameter.data.tokenizers.bpe import BpeTokenizer
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.errors import ConfigError


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(1, 10_000))
def test_shares_are_whole_and_near(weights, n_rows):
    counts = apportion(weights, n_rows)
    assert sum(counts) == n_rows
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - n_rows * weight / sum(weights)) < 1


class Rows:
    """An order of which only the length is asked."""

    rows_per_epoch = 100


def blend(*weights, seed=3):
    return Mixture([Rows() for _ in weights], weights, seed)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 3.0), (0.5, 0.3, 0.2)])
def test_every_source_is_read_row_after_row(weights):
    n_rows = 2 * BLOCK_ROWS + 100
    sources, places = blend(*weights).assign(np.arange(n_rows))
    for source, weight in enumerate(weights):
        own = places[sources == source]
        assert own.tolist() == list(range(len(own)))
        assert abs(len(own) / n_rows - weight / sum(weights)) < 0.02
    # Any rows, in any order, are what they are among all.
    some = np.array([BLOCK_ROWS + 7, 3, 2 * BLOCK_ROWS])
    for one, all_of_them in zip(blend(*weights).assign(some), (sources, places), strict=True):
        assert one.tolist() == all_of_them[some].tolist()
    if len(weights) > 1:
        assert (blend(*weights, seed=4).assign(np.arange(n_rows))[0] != sources).any()
        assert (sources[:BLOCK_ROWS] != sources[BLOCK_ROWS : 2 * BLOCK_ROWS]).any()


def test_an_epoch_has_read_every_source():
    uneven = blend(1.0, 3.0)
    n_rows = uneven.rows_per_epoch
    assert n_rows == 400
    assert uneven.passes(n_rows) == [1.0, 3.0]


def test_a_weight_that_gets_no_row_is_refused():
    with pytest.raises(ConfigError, match="weight=1e-09 is too small"):
        blend(1.0, 1e-9)


def config(tmp_path, **data):
    files = {"a": "abcdefgh" * 40, "b": "ABCDEFGHabcdefgh" * 30}
    for name, text in files.items():
        (tmp_path / f"{name}.txt").write_text(text)
    sources = [
        {"path": str(tmp_path / "b.txt"), "weight": 1},
        {"path": str(tmp_path / "a.txt"), "weight": 3},
    ]
    return Config.model_validate(
        {
            "model": {"context_length": 8},
            "data": {"sources": sources, **data},
            "train": {"batch_size": 16},
        }
    )


@pytest.mark.parametrize("order", ["random", "shuffled", "sequential"])
def test_batches_of_a_blend(tmp_path, order):
    settings = config(tmp_path, order=order)
    dataset = open_dataset(settings.data)
    train = dataset.split("train")
    assert [part.n_tokens for part in train.parts] == [432, 288]
    assert train.n_tokens == 720
    assert dataset.split("val").n_tokens == 48 + 32
    batches = training_batches(settings, train)
    assert batches.rows_per_epoch == max(53 * 4, -(-35 * 4 // 3))
    capitals = [
        [any(c.isupper() for c in dataset.tokenizer.decode(row)) for row in batches.batch(n).inputs]
        for n in range(40)
    ]
    # A quarter of the rows is b's; half of its windows have capitals where they are aligned with
    # its period, nearly all of them elsewhere.
    assert 0.08 < np.mean(capitals) < 0.32
    whole = batches.batch(7)
    part = training_batches(settings, train).batch(7, np.array([5, 2]))
    assert (part.inputs == whole.inputs[[5, 2]]).all()
    assert (part.targets == whole.targets[[5, 2]]).all()


def test_a_source_is_read_in_its_order(tmp_path):
    settings = config(tmp_path, order="sequential")
    dataset = open_dataset(settings.data)
    batches = training_batches(settings, dataset.split("train"))
    a = dataset.split("train").parts[1]
    rows = [tuple(row) for n in range(6) for row in batches.batch(n).inputs]
    from_a = [tuple(a.tokens[i : i + 8].tolist()) for i in range(0, 280, 8)]
    seen = [row for row in rows if not any(c.isupper() for c in dataset.tokenizer.decode(row))]
    assert seen[:35] == from_a[:35]


@pytest.mark.parametrize(
    "order", [{"order": each} for each in ("random", "shuffled", "streamed", "documents")]
    + [{"order": "documents", "packing": True}],
    ids=lambda data: "-".join(map(str, data.values())),
)  # fmt: skip
def test_sources_of_equal_length_are_read_unlike(tmp_path, order):
    """And the first of them as a run on it alone reads it."""
    lines = [f"{number:03d}" for number in range(300)]
    for name in "ab":
        rows = [json.dumps({"text": name * (int(line) % 3) + line}) for line in lines]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    paths = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    (tmp_path / "bytes.json").write_bytes(BpeTokenizer([*BYTE_CHARACTERS], []).to_bytes())
    data = {"tokenizer": str(tmp_path / "bytes.json"), "validation_fraction": 0.0, **order}

    def spans(own_keys, **of_data):
        settings = Config.model_validate(
            {
                "model": {"context_length": 8},
                "data": {**data, **of_data},
                "train": {"batch_size": 64},
            }
        )
        dataset = open_dataset(settings.data)
        try:
            batches = training_batches(settings, dataset.split("train"), own_keys=own_keys)
            rows = [batches.source_rows(0, np.arange(8))] if not batches.mixture else []
            for each in batches._orders if batches.mixture else ():
                rows.append(each.rows(0, np.arange(8)))
        finally:
            dataset.close()
        return rows

    sources = [{"path": path, "weight": 1} for path in paths]
    first, second = spans(True, sources=sources)
    assert first != second
    same = spans(False, sources=sources)  # as earlier versions
    assert same == [first, first]
    if order["order"] != "random":  # whose draws are numbered by step
        (alone,) = spans(True, path=paths[0])
        assert [each.row for each in alone] == first


def test_the_file_of_a_run_reads_back(tmp_path):
    settings = config(tmp_path, evaluations=[{"name": "more", "path": "more.txt"}])
    file = tmp_path / "config.toml"
    file.write_text(to_toml(settings))
    assert load_config(file) == settings


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"path": "x"}, "exclude each other"),
        ({"sources": [{"weight": 1}]}, r"data.sources\[0\] needs one of corpus .* and path"),
        ({"sources": [{"path": "x", "corpus": "stdlib"}]}, "needs one of"),
        ({"sources": [{"path": "x", "wieght": 1}]}, "wieght is no key; the tables of data.sources"),
        (
            {"sources": [{"path": "x", "weight": 0}]},
            r"sources\[0\].weight=0 must be a number above",
        ),
        ({"order": "columns"}, "data.order='columns' cuts one text"),
        ({"max_bytes": 9}, "data.max_bytes=9 cuts one text"),
        ({"evaluations": [{"name": "val", "path": "x"}]}, "another split has"),
    ],
)
def test_refusals(tmp_path, data, words):
    valid = config(tmp_path)
    if "path" in data:
        data = {**data, "sources": valid.model_dump()["data"]["sources"]}
    with pytest.raises(ConfigError, match=words):
        load_config(valid, {"data": data})


def test_another_text_replaces_a_blend(tmp_path):
    changed = load_config(config(tmp_path), ["--data.path", "novel.txt"])
    assert changed.data.sources == ()
    assert changed.name == "novel"
