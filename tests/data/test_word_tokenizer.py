"""Words in the `basic_english` manner."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.data.tokenizers.word import UNKNOWN, WordTokenizer, normalized_words
from pentameter.errors import ConfigError

FOLDER = Path(os.environ.get("PENTAMETER_DATA_DIR", "absent"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        (" \n\t\r\n ", ""),
        ("The CAT\n sat", "the cat sat"),
        ("It's 'so'.", "it ' s ' so ' ."),
        ('He said "no".', "he said no ."),
        ('a"b', "ab"),
        ("3.14, 1,000 and e.g. (this)", "3 . 14 , 1 , 000 and e . g . ( this )"),
        ("what?! no; yes: so", "what ? ! no yes so"),
        ("a;b:c", "a b c"),
        ("one<br />two<BR />three", "one two three"),
        ('one<br "/>two <b"r /> x', "one two x"),
        ("one<br/>two<br  />", "one<br/>two<br />"),
        ("a<br.", "a<br ."),
        (" = <unk> @-@ = <UNK>", "= <unk> @-@ = <unk>"),
        ("it—self [x] {y} a/b", "it—self [x] {y} a/b"),
        ("ΌΣΟΣ ÀÉ İ", "όσος àé i̇"),
        ("no\u00a0break\u2003space\x1cend", "no break space end"),
    ],
)
def test_words_of_a_text(text, words):
    assert normalized_words(text) == words.split(" ") * bool(words)


def test_the_most_frequent_words_come_first_and_ties_by_code_point():
    tokenizer = WordTokenizer.from_documents(["b a c b", "Z b <unk> é a <unk> <unk> <unk>"])
    assert tokenizer.words == (UNKNOWN, "b", "a", "c", "z", "é")
    assert tokenizer.vocab_size == 6
    assert tokenizer.end_of_text is None


def test_unseen_words_and_the_text_s_own_mark_are_unknown():
    tokenizer = WordTokenizer.from_documents(["the cat sat"])
    ids = tokenizer.encode("The <unk> dog sat")
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == "the <unk> <unk> sat"
    assert (ids == 0).tolist() == [False, True, True, False]
    assert tokenizer.encode("\ud800").tolist() == [0]


def test_lines_without_words_give_no_tokens():
    tokenizer = WordTokenizer.from_documents(["a b"])
    batch = tokenizer.encode_batch(["a", "", " \n", "b a"])
    assert [ids.tolist() for ids in batch] == [[1], [], [], [2, 1]]
    assert tokenizer.decode([]) == ""


@given(st.lists(st.sampled_from("ab 'Σ.\n,\"<br />;é"), max_size=40).map("".join))
def test_words_in_the_vocabulary_come_back(text):
    words = normalized_words(text)
    if not words:
        with pytest.raises(ConfigError, match="no words"):
            WordTokenizer.from_documents([text])
        return
    tokenizer = WordTokenizer.from_documents([text])
    assert tokenizer.decode(tokenizer.encode(text)).split() == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "'<unk>'"),
        (["the", "<unk>"], "first word"),
        (["<unk>", "a", "b", "a"], "'a' stands more than once"),
        (["<unk>", "a b"], "word 1 of the vocabulary, 'a b'"),
        (["<unk>", ""], "not one word"),
        (["<unk>", "\ud800"], "not one word"),
    ],
)
def test_wrong_vocabularies_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        WordTokenizer(words)


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(ConfigError, match="id 2 at position 1"):
        WordTokenizer([UNKNOWN, "a"]).decode([0, 2])


def test_the_hash_is_of_the_words_in_their_order():
    hashes = {WordTokenizer([UNKNOWN, *words]).hash for words in ("ab", "ba", "abc")}
    assert len(hashes) == 3
    # Pinned: checkpoints and shards of earlier versions must keep their tokenizer.
    assert WordTokenizer([UNKNOWN, "a", "é"]).hash.startswith("242643c79cd45871")


@pytest.mark.parametrize(("split", "n_words"), [("valid", 214_417), ("test", 241_859)])
def test_wikitext_2_has_the_words_that_torchtext_counts(split, n_words):
    """PyTorch's word language modeling tutorial has 10 columns of 21,441 and 24,185 words."""
    file = FOLDER / f"wikitext-2/{split}.txt"
    if not file.is_file():
        pytest.skip(f"needs PENTAMETER_DATA_DIR with wikitext-2/{split}.txt")
    assert len(normalized_words(file.read_bytes().decode())) == n_words
