"""The pieces of a text, and its tokens with their chances, whatever the tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "generation"))

from tokenizer_forms import FORMS

from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.serve.continuation import CachedDecoder, Continuation, Piece, TextRequest

forms = pytest.mark.parametrize("tokenizer", FORMS.values(), ids=FORMS.keys())


def written(tokenizer: LibraryTokenizer, ids: list[int], **asked: object) -> list[Piece]:
    """The pieces of a text that has the tokens `ids`, as far as it goes."""
    values: dict[str, object] = {"prompt": np.array([1]), "n_rivals": 3, "follows_text": False}
    continuation = Continuation(
        TextRequest(max_tokens=len(ids), **(values | asked)),  # type: ignore[arg-type]
        CachedDecoder(tokenizer),
    )
    pieces = []
    for number in ids:
        logits = np.zeros(tokenizer.vocab_size)
        logits[number] = 9.0
        pieces.append(continuation.push(number, logits))
        if continuation.finish_reason:
            break
    return pieces


@forms
@given(data=st.data())
def test_tokens_joined_are_the_text(tokenizer: LibraryTokenizer, data: st.DataObject) -> None:
    often = tokenizer.encode("  a👋é. ab").tolist()
    one = st.one_of(st.sampled_from(often), st.integers(0, tokenizer.vocab_size - 1))
    ids = data.draw(st.lists(one, min_size=1, max_size=10))
    end = next(number for number in range(tokenizer.vocab_size) if number not in ids)
    is_ended = data.draw(st.booleans())  # by a token, perhaps within a character
    pieces = written(tokenizer, [*ids, end] if is_ended else ids, ends=frozenset([end]))
    text = "".join(piece.text for piece in pieces)
    assert text == tokenizer.decode(ids)
    chances = [chance for piece in pieces for chance in piece.chances]
    assert len(chances) == len(ids)
    assert "".join(chance.text for chance in chances) == text
    for chance in chances:
        assert text[chance.offset :].startswith(chance.text)
        assert chance.rivals[0] == (chance.text, chance.logprob)


def test_rivals_are_written_as_they_would_continue_the_text() -> None:
    tokenizer = FORMS["prepend"]
    ids = tokenizer.encode("a b").tolist()
    (_, last) = [
        chance for piece in written(tokenizer, ids, n_rivals=300) for chance in piece.chances
    ]
    assert last.text == " b"
    assert {" a", "a", "  ", "</s>", "\n"} <= {text for text, _ in last.rivals}


def test_a_stop_text_of_bytes_ends_a_text_at_once() -> None:
    tokenizer = FORMS["prepend"]
    ids = tokenizer.encode("a\n👋b").tolist()
    pieces = written(tokenizer, ids, stop=("\n",))
    assert "".join(piece.text for piece in pieces) == "a"
    assert (pieces[-1].finish_reason, pieces[-1].n_tokens) == ("stop", 2)
    assert [chance.text for piece in pieces for chance in piece.chances] == ["a"]
