"""A tokenizer.json of another kind than ours: kept as it is, and given whole documents."""

import json

import numpy as np
import pytest
import tokenizers

from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.chunking import Chunker
from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.data.tokenizers.setting import load_tokenizer
from pentameter.errors import ConfigError, CorruptError

WORDS = {"the": 0, "cat": 1, ".\n": 2, "?": 3}


def content():
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(r"[.]\n| "), "isolated"
    )
    library.add_special_tokens(["<end>"])
    library.enable_truncation(2)
    library.enable_padding(length=9)
    return json.loads(library.to_str())


def test_a_file_is_the_same_tokenizer(tmp_path):
    tokenizer: Tokenizer = LibraryTokenizer(content(), 4)
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert (again.hash, again.vocab_size, again.end_of_text) == (tokenizer.hash, 5, 4)
    ids = again.encode("the cat.\nthe<end>")
    assert ids.dtype == np.int64
    assert len(ids) == 5  # neither cut short nor filled up
    assert 4 not in ids
    assert again.encode_batch(["the", ""])[1].tolist() == []
    with pytest.raises(ConfigError, match="token id 5"):
        again.decode([5])


@pytest.mark.parametrize(
    ("whole", "end", "said"),
    [
        ({}, None, "the tokenizers library cannot open it"),
        (None, 9, "its end of text 9 is outside the vocabulary 0 … 4"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, None, "cannot open|empty"),
    ],
)
def test_what_the_library_does_not_take_is_refused(whole, end, said):
    with pytest.raises(ConfigError, match=said):
        LibraryTokenizer(content() if whole is None else whole, end)


@pytest.mark.parametrize("stored", [{}, {"tokenizer": []}, {"tokenizer": {}, "end_of_text": "x"}])
def test_damaged_content_is_refused(stored):
    with pytest.raises(CorruptError, match=r'"(tokenizer|end_of_text)" is'):
        LibraryTokenizer.from_content(stored)


def test_a_foreign_file_is_told_from_ours(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content()))
    with pytest.raises(CorruptError, match=r"`pentameter import` reads the tokenizer.json"):
        load_tokenizer(path)


def test_documents_are_not_cut_where_tokens_may_end_elsewhere():
    chunker = Chunker("library", longest=100)
    assert [chunker.feed("the cat.\n" * 10) for _ in range(1)] == [""]
    given = chunker.feed("the cat.\n" * 10)
    assert given + chunker.rest() == "the cat.\n" * 20
