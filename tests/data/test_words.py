"""Words and their ids are those of the `tokenizers` library, for any text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentameter.data.tokenizers.byte_level import words as words_module
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.byte_level.words import Words, WordTable

TEXT = (
    "the cat's hat sat on\r\n\r\nthe mat, and 12 12 hats ... \t\t  the été 中文中文 <|endoftext|>\n"
)
LIBRARY = train_bpe([TEXT * 3], 320)._library
WORDS, TABLE = Words(LIBRARY.pre_tokenizer), WordTable(LIBRARY, 320)

any_text = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8"), max_size=6),
        st.text("ab '\n\r\t\x0b\x1c\x1f\x85\u00a0\u3000\u2028sdmtlver!_1²Ⅷ٣é\u0301中", max_size=12),
        st.sampled_from(
            ["the cat", "'ll", "'S", "  ", "\r\n", "<|endoftext|>", "x" * 99, "é" * 70]
        ),
    ),
    max_size=12,
).map("".join)


def theirs(text):
    return [text[a:b] for _, (a, b) in LIBRARY.pre_tokenizer.pre_tokenize_str(text)]


@settings(max_examples=200)
@given(any_text)
def test_any_text_as_the_library(text):
    assert WORDS.split(text) == theirs(text)
    assert TABLE.encode(text).tolist() == LIBRARY.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("around", ["{}", " {}", "a{}b", "1{}1", "!{}!", " {} a", "'{}"])
def test_every_kind_of_character_as_the_library(around):
    """All of the first planes' scripts, and a part of what lies behind."""
    points = [
        *range(0x3100),
        *range(0xA000, 0xAC00),
        *range(0xF900, 0x10000),
        *range(0x10000, 0x20000, 7),
    ]
    text = "\n".join(around.format(chr(point)) for point in points)
    assert WORDS.split(text) == theirs(text)


def test_a_small_table_forgets_words_and_gives_the_same_ids(monkeypatch):
    monkeypatch.setattr(words_module, "_MOST_WORDS", 3)
    table = WordTable(LIBRARY, 320)
    text = TEXT * 5 + "long" * 40
    for _ in range(2):
        assert table.encode(text).tolist() == LIBRARY.encode(text).ids
        assert 0 < len(table) <= 3
        assert all(len(word) <= 64 for word in table)


@pytest.mark.parametrize("vocab_size", [1 << 16, (1 << 16) + 1])
def test_ids_of_either_width(vocab_size):
    table = WordTable(LIBRARY, vocab_size)
    assert table.encode(TEXT).tolist() == LIBRARY.encode(TEXT).ids
    assert table.encode("").tolist() == []
    assert {len(ids) % (2 if vocab_size <= 1 << 16 else 4) for ids in table.values()} == {0}
