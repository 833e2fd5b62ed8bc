"""Pieces of a text encode to the tokens of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.chunking import chunks, last_boundary
from pentameter.data.tokenizers.word import normalized_words

BPE = train_bpe(["the cat's hat  sat on\n\nthe mat <br /> and 12 12 hats ... \t\t  the cat"], 320)

spaced = st.lists(
    st.sampled_from(
        [
            *("\n", " ", "  ", "\t", "\r\n", "a", "cat", "'s", "12", ".", '"', "Σ", "<br />", "<"),
            *("/>", "br", "\u00a0", "\u3000", "\x1c", "\x85", "é", "\u0301", "_", "中"),
        ]
    ),
    max_size=30,
).map("".join)


@given(spaced, st.integers(1, 12))
def test_tokens_of_the_pieces_are_those_of_the_whole(text, n_characters):
    pieces = list(chunks(text, n_characters))
    assert "".join(pieces) == text
    assert all(len(piece) >= n_characters for piece in pieces[:-1])
    assert [w for piece in pieces for w in normalized_words(piece)] == normalized_words(text)
    assert [i for p in pieces for i in BPE._library.encode(p).ids] == BPE._library.encode(text).ids


@given(spaced, spaced)
def test_what_is_before_the_last_cut_needs_nothing_behind_it(text, more):
    end = last_boundary(text)
    start, rest = text[:end], text[end:] + more
    words = normalized_words(start) + normalized_words(rest)
    assert words == normalized_words(text + more)
    ids = BPE._library.encode(start).ids + BPE._library.encode(rest).ids
    assert ids == BPE._library.encode(text + more).ids


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("", 0),
        ("a", 0),
        ("\na", 0),
        ("a\n", 1),
        ("a b", 1),
        ("a ", 0),  # a space stays with the word to come
        ("a b  ", 1),
        ("x a\n\n\n", 3),
        ("one two<br />", 3),
        ("noblanksatall", 0),
    ],
)
def test_last_boundary(text, end):
    assert last_boundary(text) == end


def test_pieces_are_not_much_longer_than_asked():
    *pieces, _ = chunks("word " * 1000, 99)
    assert all(99 <= len(piece) < 99 + 5 for piece in pieces)
    assert list(chunks("x" * 5000, 10)) == ["x" * 5000]
    assert list(chunks("", 10)) == []
