"""Documents that begin with a token that the tokenizer puts there, such as Llama's."""

import numpy as np
import pytest
from preparing import prepare, text_of_documents

from pentameter.config.data_schema import DataConfig
from pentameter.data.open_dataset import open_dataset
from pentameter.data.prepare.splits import Splitting
from pentameter.data.shards.opening import open_shards
from pentameter.data.tokenizers.byte_level.training import train_bpe

TEXT = "the cat sat on the mat "


def tokenizer(*prefix):
    found = train_bpe([TEXT * 9], 270, ["<|endoftext|>", "<s>"])
    found.prefix = tuple(found.special_tokens[text] for text in prefix)
    return found


BEGINS = tokenizer("<s>")


@pytest.mark.parametrize("n_processes", [0, 1])
def test_each_document_has_it_once(tmp_path, n_processes):
    documents = ["the cat", "", "mat " * 30_000, "sat"]
    chunks = [[text[i : i + 999] for i in range(0, len(text), 999)] for text in documents]
    text = text_of_documents(lambda: map(iter, chunks), n_bytes=130_000)
    settings = {"splitting": Splitting(0.1, by="position"), "n_processes": n_processes}
    prepare(text, tmp_path / "out", tokenizer=BEGINS, **settings)
    dataset = open_shards(tmp_path / "out" / "text.json")
    (begin,), end = BEGINS.prefix, BEGINS.end_of_text
    tokens = [dataset.split(name).tokens[:].tolist() for name in ("train", "val")]
    whole = [token for split in tokens for token in split]
    # A document that goes on in another split does not begin again there.
    pieces = [[begin, *BEGINS.encode(text), end] for text in documents if text]
    assert whole[: len(pieces[0])] == pieces[0]
    assert whole[-len(pieces[-1]) :] == pieces[-1]
    assert (whole.count(begin), whole.count(end)) == (3, 3)
    starts = dataset.split("train").document_starts
    assert [tokens[0][start] for start in starts] == [begin] * len(starts)
    assert dataset.split("train").n_bytes + dataset.split("val").n_bytes == sum(map(len, documents))


def test_prepared_data_of_the_same_ids_are_not_taken_for_those(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 9)
    data = DataConfig(path=str(path), validation_fraction=0.0)
    before = open_dataset(data, tokenizer=tokenizer())
    after = open_dataset(data, tokenizer=BEGINS)
    assert after.hash != before.hash
    assert after.split("train").n_tokens == before.split("train").n_tokens + 1
    again = open_dataset(data, tokenizer=tokenizer())
    assert again.hash == before.hash
    assert np.array_equal(again.split("train").tokens[:], before.split("train").tokens[:])


def test_shards_that_begin_otherwise_are_taken_with_a_warning(tmp_path):
    text = text_of_documents(lambda: iter([iter([TEXT * 9])]))
    prepare(text, tmp_path / "out", tokenizer=tokenizer())
    warnings = []
    data = DataConfig(path=str(tmp_path / "out"))
    dataset = open_dataset(data, tokenizer=BEGINS, warnings=warnings)
    assert dataset.tokenizer.prefix == ()
    (warning,) = warnings
    assert "begin each document with no token, the tokenizer asked for with '<s>'" in warning
