"""Pieces of text put together are the whole text, whatever the tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from tokenizer_forms import FORMS

from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.data.tokenizers.word import WordTokenizer
from pentameter.generation.detokenizer import Detokenizer


class Bytes:
    """Every token is one to three bytes; characters are cut anywhere."""

    byte_ids: frozenset[int] = frozenset()

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens

    def decode(self, ids: Any) -> str:
        return b"".join(self.tokens[i] for i in ids).decode("utf-8", errors="replace")


class Words:
    """Tokens are joined with spaces."""

    byte_ids: frozenset[int] = frozenset()

    def decode(self, ids: Any) -> str:
        return " ".join(f"w{i}" for i in ids)


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    text = Detokenizer(tokenizer)
    return [*(text.push(token) for token in ids), text.flush()]


@given(st.lists(st.integers(0, 3), max_size=20))
def test_characters_come_one_by_one(ids: list[int]) -> None:
    tokenizer = CharTokenizer("a\né→")
    assert pieces(tokenizer, ids) == [*(tokenizer.decode([i]) for i in ids), ""]


def test_a_replacement_character_in_the_vocabulary_is_not_lost() -> None:
    tokenizer = CharTokenizer("a\ufffd")
    assert "".join(pieces(tokenizer, [1, 1, 0, 1, 1])) == "\ufffd\ufffda\ufffd\ufffd"


@given(st.lists(st.integers(0, 5), max_size=12))
def test_words(ids: list[int]) -> None:
    assert "".join(pieces(Words(), ids)) == Words().decode(ids)


@given(st.text(max_size=12), st.data())
def test_characters_cut_into_bytes_are_held_back(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    tokens = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    came = pieces(Bytes(tokens), range(len(tokens)))
    assert "".join(came) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in came)


@given(st.lists(st.binary(max_size=3), max_size=12))
def test_bytes_that_are_no_text_at_all(tokens: list[bytes]) -> None:
    tokenizer = Bytes(tokens)
    assert "".join(pieces(tokenizer, range(len(tokens)))) == tokenizer.decode(range(len(tokens)))


def test_garbage_is_not_held_back_forever() -> None:
    text = Detokenizer(Bytes([b"\xff"]))
    shown = "".join(text.push(0) for _ in range(50))
    assert len(shown) == 49


TEXTS = st.text(st.sampled_from("ab. é中文👋"), max_size=10)
forms = pytest.mark.parametrize("tokenizer", FORMS.values(), ids=FORMS.keys())


@forms
@given(data=st.data())
def test_any_ids_of_a_form_are_the_text_of_all(
    tokenizer: LibraryTokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(ids_of(tokenizer), max_size=12))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@forms
@given(data=st.data())
def test_any_ids_of_a_form_continue_a_prompt(
    tokenizer: LibraryTokenizer, data: st.DataObject
) -> None:
    prompt = data.draw(st.lists(ids_of(tokenizer), max_size=8))
    ids = data.draw(st.lists(ids_of(tokenizer), max_size=8))
    shown, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    assume(whole.startswith(shown))  # no character that was shown as unfinished
    stream = Detokenizer(tokenizer, prompt)
    assert shown + "".join([*map(stream.push, ids), stream.flush()]) == whole


@forms
@given(TEXTS)
def test_text_of_a_form_is_never_cut_in_a_character(tokenizer: LibraryTokenizer, text: str) -> None:
    ids = tokenizer.encode(text).tolist()
    came = pieces(tokenizer, ids)
    assert "".join(came) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in came)


def ids_of(tokenizer: LibraryTokenizer) -> st.SearchStrategy[int]:
    """Draw ids, those of the bytes of a few characters and of spaces more often than others."""
    often = tokenizer.encode("  a👋é. ab中\n").tolist()
    return st.one_of(st.sampled_from(often), st.integers(0, tokenizer.vocab_size - 1))


def test_what_is_held_back_can_be_looked_at() -> None:
    tokenizer = FORMS["prepend"]
    stream = Detokenizer(tokenizer)
    *ids, last = tokenizer.encode("a\n👋").tolist()
    assert "".join(map(stream.push, ids)) == "a"
    assert stream.held == "\n"
    assert (stream.push(last), stream.held, stream.flush()) == ("", "\n👋", "\n👋")


BPE = train_bpe(["né à Paris 👋🏽 中文 中文 né à Paris 👋🏽 né"], 290)
WORDS = WordTokenizer(["<unk>", "the", "cat", "."])


@given(st.lists(st.integers(0, BPE.vocab_size - 1), max_size=20))
def test_any_tokens_of_a_byte_level_tokenizer(ids: list[int]) -> None:
    assert "".join(pieces(BPE, ids)) == BPE.decode(ids)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=20))
def test_text_through_a_byte_level_tokenizer_is_never_cut_in_a_character(text: str) -> None:
    came = pieces(BPE, BPE.encode(text).tolist())
    assert "".join(came) == text
    assert not any("\ufffd" in piece for piece in came)


def test_a_character_in_parts_waits_for_its_end_or_for_the_sample_s() -> None:
    ids = [BPE.vocabulary[byte] for byte in "ðŁĳĭ"]  # the four bytes of a waving hand
    assert pieces(BPE, ids) == ["", "", "", "👋", ""]
    assert pieces(BPE, ids[:3]) == ["", "", "", "\ufffd"]
    assert pieces(BPE, [*ids[:3], BPE.vocabulary["a"]]) == ["", "", "", "\ufffda", ""]


def test_an_end_of_text_is_text() -> None:
    end = BPE.end_of_text
    assert end is not None
    a = BPE.vocabulary["a"]
    assert pieces(BPE, [a, end, a]) == ["a", "<|endoftext|>", "a", ""]


def test_words_are_set_apart_and_off_from_the_prompt() -> None:
    assert pieces(WORDS, [1, 2, 0]) == ["the", " cat", " <unk>", ""]
    text = Detokenizer(WORDS, WORDS.encode("The cat"))
    assert [text.push(token) for token in (1, 2, 3)] == [" the", " cat", " ."]
    assert text.flush() == ""


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 9))
def test_pieces_behind_a_prompt_continue_its_text(ids: list[int], n_prompt: int) -> None:
    prompt, new = ids[:n_prompt], ids[n_prompt:]
    for tokenizer in (WORDS, CharTokenizer("a\né→")):
        text = Detokenizer(tokenizer, prompt)
        came = "".join([*map(text.push, new), text.flush()])
        assert tokenizer.decode(prompt) + came == tokenizer.decode(ids)
