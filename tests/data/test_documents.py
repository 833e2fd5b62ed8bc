import hashlib
import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preparing import prepare, text_of_documents

from pentameter.data.prepare.splits import Splitting, split_passages
from pentameter.data.shards.opening import open_shards
from pentameter.data.tokenizers import chunking
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chunking import Chunker
from pentameter.data.tokenizers.word import WordTokenizer

SPLITS = ("train", "val", "test")
SAMPLE = "It's the lazy dog's 12 bones;\n\n  he'll  say <br /> more.\tNaïve 日本語 🙂!\r\n" * 8
BPE = train_bpe([SAMPLE], 300)
TOKENIZERS = {
    "bpe": BPE,
    "word": WordTokenizer.from_documents([SAMPLE]),
    "char": CharTokenizer([chr(c) for c in range(0x500)]),
}
# White space of every kind beside letters, digits, marks, and the pieces that rules look for.
hard_text = st.lists(
    st.sampled_from([*" \n\t\r\x1c\x85\xa0\u3000ab1'.,_ßΣσ", "<br />", "'ll", "  ", "\n\n", "Σ "]),
    max_size=60,
).map("".join)


def corpus(documents, name="text"):
    pieces = [[text[:7], text[7:]] if len(text) > 7 else [text] for text in documents]
    n_bytes = sum(len(text.encode()) for text in documents)
    return text_of_documents(lambda: (iter(parts) for parts in pieces), name=name, n_bytes=n_bytes)


def prepared(folder, documents, **settings):
    prepare(corpus(documents), folder, **settings)
    dataset = open_shards(folder / "text.json")
    return {name: dataset.split(name) for name in SPLITS}


def in_documents(split):
    tokens = np.asarray(split.tokens)
    return [part.tolist() for part in np.split(tokens, split.document_starts[1:])]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=hard_text, cuts=st.lists(st.integers(0, 60), max_size=8))
def test_pieces_encode_as_the_whole(kind, text, cuts):
    tokenizer = TOKENIZERS[kind]
    if kind == "char":
        text = text.replace("\u3000", "")
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    old, chunking.CHUNK_CHARACTERS = chunking.CHUNK_CHARACTERS, 5
    try:
        chunker = Chunker(kind)
        parts = [*map(chunker.feed, pieces), chunker.rest()]
    finally:
        chunking.CHUNK_CHARACTERS = old
    assert "".join(parts) == text
    ids = np.concatenate(tokenizer.encode_batch(parts))
    assert ids.tolist() == tokenizer.encode(text).tolist()


def test_text_without_a_place_to_cut_is_cut_where_it_grows_too_long():
    chunker = Chunker("bpe", longest=200_000)
    parts = [chunker.feed("x" * 1000) for _ in range(500)]
    assert max(map(len, parts)) == 200_000
    assert sum(map(len, parts)) + len(chunker.rest()) == 500_000


def test_long_documents_are_cut_into_bounded_pieces():
    text = SAMPLE * 2000
    pieces = [text[i : i + 60_000] for i in range(0, len(text), 60_000)]
    parts = list(split_passages(iter([iter(pieces)]), (len(text),) * 3, Chunker("bpe")))
    assert max(len(part.text) for part in parts) < 200_000
    assert [part.starts for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part.text for part in parts) == text


DOCUMENTS = ["to be or not\n", "", "that is the question", "a\nb", "x"]


def test_end_of_text_follows_each_document(tmp_path):
    splits = prepared(tmp_path / "a", DOCUMENTS, tokenizer=BPE, splitting=Splitting(0.0))
    expected = [[*BPE.encode(text).tolist(), BPE.end_of_text] for text in DOCUMENTS if text]
    assert in_documents(splits["train"]) == expected
    assert splits["train"].n_bytes == sum(map(len, DOCUMENTS))
    assert splits["val"].document_starts.tolist() == []


def test_characters_are_one_stream_with_documents_marked(tmp_path):
    splits = prepared(tmp_path / "a", DOCUMENTS, tokenizer="char", splitting=Splitting(0.0))
    own = CharTokenizer("".join(DOCUMENTS))
    assert in_documents(splits["train"]) == [own.encode(t).tolist() for t in DOCUMENTS if t]


def test_a_document_cut_by_position_goes_on_in_the_next_split(tmp_path):
    text = ["abcdef ghij", "kl"]  # 13 characters, of which 11.7 are train's
    splits = prepared(tmp_path / "a", text, tokenizer=BPE, splitting=Splitting(0.3, 0.1))
    end = BPE.end_of_text
    assert in_documents(splits["train"]) == [BPE.encode("abcdef g"[:7]).tolist()]
    assert in_documents(splits["val"]) == [[*BPE.encode("ghij").tolist(), end]]
    assert in_documents(splits["test"]) == [[*BPE.encode("kl").tolist(), end]]


def test_words_between_documents_without_any_leave_no_trace(tmp_path):
    splits = prepared(
        tmp_path / "a", ["one two", " \n ", "two"], tokenizer="word", splitting=Splitting(0.0)
    )
    assert in_documents(splits["train"]) == [[2, 1], [1]]


def test_documents_go_where_their_text_says_in_any_order(tmp_path):
    documents = [f"document {n}\n" * (1 + n % 3) for n in range(60)]
    documents.append(documents[0])  # a copy goes where the original goes
    shuffled = documents[:]
    random.Random(0).shuffle(shuffled)
    splitting = Splitting(0.3, 0.2, "document")
    found = []
    for name, order in (("a", documents), ("b", shuffled)):
        splits = prepared(tmp_path / name, order, tokenizer=BPE, splitting=splitting)
        found.append({s: sorted(map(tuple, in_documents(split))) for s, split in splits.items()})
    assert found[0] == found[1]
    assert [len(found[0][s]) for s in SPLITS] == [31, 24, 6]
    wider = prepared(
        tmp_path / "c", documents, tokenizer=BPE, splitting=Splitting(0.5, 0.2, "document")
    )
    assert set(found[0]["val"]) < set(map(tuple, in_documents(wider["val"])))


def test_hashes_of_texts_fill_the_fractions_evenly():
    digests = [hashlib.blake2b(b"%d" % n, digest_size=8).digest() for n in range(20_000)]
    counts = np.bincount([Splitting(0.3, 0.2).split_of(digest) for digest in digests])
    # Four standard deviations of 20,000 draws are at most 277.
    np.testing.assert_allclose(counts, [10_000, 6_000, 4_000], atol=277)


def test_split_of_is_the_hash_read_as_a_fraction():
    half = b"\x80" * 8
    assert [Splitting(val, 0.2).split_of(half) for val in (0.1, 0.3, 0.4)] == [0, 0, 1]
    assert Splitting(0.1, 0.1).split_of(b"\0" * 8) == 2
    assert Splitting(0.1, 0.0).split_of(b"\0" * 8) == 1
    assert Splitting(0.9, 0.0).split_of(b"\xff" * 8) == 0
