"""Byte-level BPE: every text comes back, and nothing that is not GPT-2's kind is taken for it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.data.tokenizers.bpe import END_OF_TEXT, BpeTokenizer
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.errors import ConfigError

TEXT = "the cat sat on the mat, and the cat's hat sat on the cat.\n\n  the  end é é 42 42\n" * 3
SMALL = train_bpe([TEXT], 300)
BYTES = list(BYTE_CHARACTERS)
any_text = st.text(st.characters(codec="utf-8"))


@given(any_text)
def test_every_text_comes_back(text):
    ids = SMALL.encode(text)
    assert ids.dtype == np.int64
    assert ids.ndim == 1
    assert SMALL.decode(ids) == text
    assert SMALL.end_of_text not in ids


@given(st.lists(any_text, max_size=5))
def test_a_batch_is_its_texts(texts):
    batch = SMALL.encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [SMALL.encode(text).tolist() for text in texts]
    assert all(ids.dtype == np.int64 for ids in batch)


@pytest.mark.parametrize("text", [TEXT * 60, "x" * 100_000, "\n" * 9000, " a" * 9000, "é<|" * 5000])
def test_long_texts_are_encoded_as_a_whole(text):
    """They go to the library in pieces."""
    whole = SMALL._library.encode(text).ids
    assert SMALL.encode(text).tolist() == whole
    assert [ids.tolist() for ids in SMALL.encode_batch(["", text, "a"])][1] == whole


def test_batches_larger_than_one_call_of_the_library():
    texts = [TEXT * 1500, *["the cat "] * 20_000, TEXT * 3000]
    batch = SMALL.encode_batch(texts)
    assert [SMALL.decode(ids) for ids in batch] == texts


@given(st.lists(st.integers(0, SMALL.vocab_size - 1)))
def test_any_ids_decode(ids):
    stands_for = {BYTE_CHARACTERS[c]: c for c in BYTES}
    raw = b"".join(bytes(BYTE_CHARACTERS[c] for c in SMALL.tokens[i]) for i in ids)
    assert SMALL.decode(ids) == raw.decode("utf-8", errors="replace")
    assert "".join(stands_for[byte] for byte in raw) == "".join(SMALL.tokens[i] for i in ids)


def test_the_end_of_text_is_never_encoded_only_decoded():
    assert SMALL.end_of_text == SMALL.vocab_size - 1
    ids = SMALL.encode(f"a{END_OF_TEXT}b")
    assert len(ids) > 3
    assert SMALL.decode(ids) == f"a{END_OF_TEXT}b"
    assert SMALL.decode([SMALL.end_of_text]) == END_OF_TEXT
    assert BpeTokenizer(BYTES, []).end_of_text is None


def test_half_a_surrogate_pair_and_wrong_ids_are_refused():
    with pytest.raises(ConfigError, match=r"U\+D83D\) at position 3 .* surrogate pair"):
        SMALL.encode("abc\ud83d")
    for wrong in (-1, SMALL.vocab_size):
        with pytest.raises(ConfigError, match=f"id {wrong} at position 1"):
            SMALL.decode([0, wrong])
    assert SMALL.decode([]) == ""


def test_vocabulary_and_merges_make_the_same_tokenizer():
    again = BpeTokenizer.from_vocabulary(SMALL.vocabulary, SMALL.merges)
    assert again.hash == SMALL.hash
    assert again.vocabulary == dict(zip(SMALL.tokens, range(SMALL.vocab_size), strict=True))


def test_the_hash_is_of_ids_and_merges():
    tokens = [*BYTES, "ab", "cd"]
    merges = [("a", "b"), ("c", "d")]
    hashes = {
        BpeTokenizer(tokens, merges).hash,
        BpeTokenizer([*BYTES, "cd", "ab"], merges).hash,
        BpeTokenizer(tokens, merges[::-1]).hash,
        BpeTokenizer(tokens, merges[:1]).hash,
    }
    assert len(hashes) == 4
    # Pinned: checkpoints and shards of earlier versions must keep their tokenizer.
    assert BpeTokenizer(tokens, merges).hash.startswith("6565d1533a54071c")


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        ({"a": 0, "b": 2}, "id 2 of token 'b' is not one of 0 … 1"),
        ({"a": 0, "b": 0}, "'a' and 'b' have the same id 0"),
        ({"a": 0, "b": -1}, "id -1"),
        ({"a": False, "b": True}, "id False"),
        ({"a": "0"}, "id '0'"),
        ({"a": 0}, "lacks 255 of the 256 single bytes"),
        ({**dict(zip(BYTES, range(256), strict=True)), "a b": 256}, "'a b', is not written in"),
        ({**dict(zip(BYTES, range(256), strict=True)), "▁the": 256}, "only GPT-2's kind"),
        ({**dict(zip(BYTES, range(256), strict=True)), "": 256}, "token 256, ''"),
    ],
)
def test_wrong_vocabularies_are_refused(vocab, message):
    with pytest.raises(ConfigError, match=message):
        BpeTokenizer.from_vocabulary(vocab, [])


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        ([("a", "c")], r"merge 0, 'a c': 'ac' is not in the vocabulary"),
        ([("ab", "x"), ("a", "b")], "merge 0, 'ab x': 'abx'"),
        ([("abc", "b")], "'abc' is not"),
        ([("a", "b"), ("a", "b")], "more than once"),
    ],
)
def test_wrong_merges_are_refused(merges, message):
    with pytest.raises(ConfigError, match=message):
        BpeTokenizer([*BYTES, "ab"], merges)
