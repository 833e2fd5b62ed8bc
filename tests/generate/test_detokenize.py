"""Pieces of text put together are the whole text, whatever the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pentameter.data.tokenizer import CharTokenizer
from pentameter.generate import TextPieces


class Bytes:
    """Every token is one to three bytes; characters are cut anywhere."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens

    def decode(self, ids: Any) -> str:
        return b"".join(self.tokens[i] for i in ids).decode("utf-8", errors="replace")


class Words:
    """Tokens are joined with spaces."""

    def decode(self, ids: Any) -> str:
        return " ".join(f"w{i}" for i in ids)


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    text = TextPieces(tokenizer)
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
    text = TextPieces(Bytes([b"\xff"]))  # type: ignore[arg-type]
    shown = "".join(text.push(0) for _ in range(50))
    assert len(shown) == 49
