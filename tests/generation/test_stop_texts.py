"""A text ends before its first stop text, wherever its pieces and tokens are cut."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pentameter.data.tokenizers.base import Ends
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.generation.detokenizer import Detokenizer
from pentameter.generation.stop_texts import StopSearch

PIECES = st.lists(st.text(st.sampled_from("ab<"), max_size=4), max_size=8)
STOPS = st.lists(st.text(st.sampled_from("ab<"), min_size=1, max_size=4), max_size=3)
MARK = "<|im_end|>"
BPE = train_bpe(["Hello Ada! 12 + 6 = 14.<|im_end|>\né <|im_start|>.<|im_end|>"] * 3, 300)


def before_first(text: str, stops: Sequence[str]) -> str:
    """What stands before the first stop text."""
    return text[: min((at for each in stops if (at := text.find(each)) >= 0), default=len(text))]


@given(PIECES, STOPS)
def test_what_is_shown_is_what_stands_before_the_first_stop_text(
    pieces: list[str], stops: list[str]
) -> None:
    search, came, shown = StopSearch(stops), "", ""
    for piece in pieces:
        came, shown = came + piece, shown + search.push(piece)
        expected = before_first(came, stops)
        assert search.is_found == (expected != came)
        if search.is_found:
            break
        assert shown + search.held == expected
    assert shown + search.flush() == before_first(came, stops)


def test_what_is_not_decided_yet_may_complete_a_stop_text() -> None:
    search = StopSearch(["b\n"])
    assert (search.push("ab"), search.held) == ("a", "b")
    assert (search.push("", "c\n"), search.held, search.is_found) == ("", "b", False)
    assert (search.push("", "\n"), search.is_found, search.flush()) == ("", True, "")


@given(st.text(st.sampled_from("<|im_end>é. "), max_size=12), st.booleans())
def test_a_sample_ends_at_a_stop_text_whatever_its_tokens(text: str, has_mark: bool) -> None:
    tokens = BPE.encode(f"{text}{MARK if has_mark else ''}\n12").tolist()
    sample = Detokenizer(BPE, ends=Ends(texts=(MARK,)))
    shown = ""
    for token in tokens:
        assert not sample.is_ended or sample.push(token) == ""
        shown += sample.push(token)
        assert MARK not in shown + sample.held
    assert sample.is_ended == has_mark
    assert shown + sample.flush() == (text if has_mark else f"{text}\n12")


def test_a_stop_text_may_begin_within_a_token_and_another_end_may_cut_it_short() -> None:
    tokens = BPE.encode("14.<|im_end|>\n").tolist()
    assert any(BPE.decode([token]).startswith(".<") for token in tokens)
    sample = Detokenizer(BPE, ends=Ends(texts=(MARK,)))
    assert ("".join(map(sample.push, tokens)), sample.is_ended) == ("14.", True)
    assert BPE.end_of_text is not None
    half = Detokenizer(BPE, ends=Ends(BPE.end_ids, (MARK,)))
    assert "".join(map(half.push, BPE.encode("a<|im").tolist())) == "a"
    assert half.held == "<|im"
    assert (half.push(BPE.end_of_text), half.is_ended, half.flush()) == ("", True, "<|im")
