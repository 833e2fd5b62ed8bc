"""Tokenizers in llama.cpp's form: what they hold, and what is refused."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
import tokenizers
from gguf_models import BPE, RULES, TEXTS, byte_level, sentencepiece_like

from pentameter.checkpoint.gguf.vocabulary import TokenType, Vocabulary, vocabulary
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.data.tokenizers.word import WordTokenizer
from pentameter.errors import ConfigError


def merged_by_scores(known: Vocabulary, text: str) -> list[int]:
    """SentencePiece's algorithm: of all neighbors that make a token, those whose token has the
    highest score are merged first; what is no token in the end becomes its bytes."""
    ids = {token: number for number, token in enumerate(known.tokens)}
    assert known.scores is not None
    pieces = list((" " * known.adds_space + text).replace(" ", "▁"))
    while True:
        found = [
            (-known.scores[ids[left + right]], at)
            for at, (left, right) in enumerate(itertools.pairwise(pieces))
            if left + right in ids
        ]
        if not found:
            break
        _, at = min(found)
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
    return [
        number
        for piece in pieces
        for number in (
            [ids[piece]] if piece in ids else [ids[f"<0x{b:02X}>"] for b in piece.encode()]
        )
    ]


def test_scores_merge_as_the_merges_do():
    tokenizer = sentencepiece_like()
    known = vocabulary(tokenizer)
    assert (known.model, known.adds_space, known.merges) == ("llama", True, None)
    assert known.types[:4] == [
        TokenType.UNKNOWN,
        TokenType.CONTROL,
        TokenType.CONTROL,
        TokenType.BYTE,
    ]
    letters = random.Random(1)
    shuffled = ["".join(letters.choices(TEXTS[0] + TEXTS[1], k=60)) for _ in range(20)]
    for text in [*TEXTS, *shuffled]:
        assert merged_by_scores(known, text) == tokenizer.encode(text).tolist(), text


def test_merges_that_no_score_can_give_are_refused():
    merges = sentencepiece_like().content["model"]["merges"]
    twice = next(n for n, (a, b) in enumerate(merges) if [a + b] == ["".join(merges[n + 1])])
    apart = [*merges[: twice + 1], *merges[twice + 2 :], merges[twice + 1]]
    for changed in (merges[:twice] + merges[twice + 1 :], apart):
        with pytest.raises(ConfigError, match="another order than SentencePiece's scores"):
            vocabulary(sentencepiece_like(model={"merges": changed}))


def test_a_normalizer_that_rewrites_is_refused():
    lower = {"type": "Lowercase"}
    with pytest.raises(ConfigError, match="rewrites text by Lowercase"):
        vocabulary(sentencepiece_like(normalizer=lower))
    never = {"type": "Metaspace", "replacement": "▁", "split": False, "prepend_scheme": "never"}
    known = vocabulary(sentencepiece_like(normalizer=None, pre_tokenizer=never))
    assert not known.adds_space


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["name"])
def test_a_rule_for_splitting_is_recognized(rule):
    known = vocabulary(byte_level(rule))
    assert (known.model, known.pre, known.notes) == ("gpt2", rule["name"], ())
    assert known.tokens == list(BPE.tokens)
    assert known.types[BPE.end_of_text] == TokenType.CONTROL
    assert known.merges == [" ".join(pair) for pair in BPE.merges]
    (note,) = vocabulary(byte_level(rule, normalizer={"type": "NFC"})).notes
    assert "NFC" in note


def test_a_rule_that_is_not_known_is_refused():
    other = {"steps": [r"\p{L}+"]}
    with pytest.raises(ConfigError, match="splits text by a rule that is none of these: gpt-2, "):
        vocabulary(byte_level(other))
    with pytest.raises(ConfigError, match="the normalizer Lowercase"):
        vocabulary(byte_level(RULES[0], normalizer={"type": "Lowercase"}))


def test_characters_are_tokens_of_their_own():
    known = vocabulary(CharTokenizer("ab é\n"))
    assert known.model == "gemma4"
    assert known.tokens == ["\n", "▁", "a", "b", "é"]
    assert "leaves out characters" in known.notes[0]
    with pytest.raises(ConfigError, match="both a space and '▁'"):
        vocabulary(CharTokenizer("a ▁"))


def test_words_and_other_models_are_refused():
    with pytest.raises(ConfigError, match=r"\(word\) cuts text into whole words; --to hf"):
        vocabulary(WordTokenizer(["<unk>", "a"]))
    library: Any = tokenizers.Tokenizer(tokenizers.models.Unigram([("a", 0.0), ("b", -1.0)], 0))
    with pytest.raises(ConfigError, match="a Unigram model"):
        vocabulary(LibraryTokenizer(json.loads(library.to_str()), None))
