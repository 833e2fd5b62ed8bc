"""Tokenizers of a tokenizer.model: ids are SentencePiece's own."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece_models import FORMS, LANGUAGES, sentencepiece, trained

from pentameter.data.tokenizers.chat import escaped
from pentameter.data.tokenizers.published.sentencepiece_model import SentencePieceTokenizer
from pentameter.data.tokenizers.setting import load_tokenizer
from pentameter.errors import ConfigError, CorruptError
from pentameter.generation.detokenizer import Detokenizer

LLAMA, BPE, T5, GEMMA, INST = FORMS
ODD = [
    "",
    " ",
    "  two  spaces ",
    "a\nb\n\n\tc",
    "🙂 e\u0301 é ﬁ ①",
    "</s><s><unk>",
    "▁",
    "\x00\x01",
]
TEXTS = st.text(st.characters(codec="utf-8")) | st.lists(
    st.sampled_from([*" ".join(LANGUAGES.values()), *ODD, "[INST]", "<start_of_turn>", "aaaa"])
).map("".join)


def own(form):
    return sentencepiece.SentencePieceProcessor(model_proto=trained(form))


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_sentencepieces_own(form):
    tokenizer, theirs = SentencePieceTokenizer(trained(form)), own(form)
    texts = [*LANGUAGES.values(), *ODD, " ".join(LANGUAGES.values()) * 20]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == theirs.encode(texts)
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == theirs.decode(ids.tolist())
        assert tokenizer._piece(text, is_first=True).ids.tolist() == ids.tolist()
    assert tokenizer.vocab_size == theirs.vocab_size()


@pytest.mark.parametrize("form", FORMS)
@given(text=TEXTS)
def test_ids_of_any_text_are_sentencepieces_own(form, text):
    tokenizer, theirs = SentencePieceTokenizer(trained(form)), own(form)
    ids = tokenizer.encode(text)
    assert ids.tolist() == theirs.encode(text)
    assert tokenizer.decode(ids) == theirs.decode(ids.tolist())
    pieces = Detokenizer(tokenizer)
    assert "".join([*map(pieces.push, ids.tolist()), pieces.flush()]) == tokenizer.decode(ids)


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_model_is_the_same(form, tmp_path):
    tokenizer = SentencePieceTokenizer(trained(form), 1, {"<|x|>": {"id": len(ids_of(form))}})
    tokenizer.prefix = (2,)
    tokenizer.save(tmp_path / "tokenizer.json")
    for again in (
        load_tokenizer(tmp_path / "tokenizer.json"),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert again.hash == tokenizer.hash
        assert again.encode("a b").tolist() == tokenizer.encode("a b").tolist()
        assert again.special_tokens == tokenizer.special_tokens
        assert (again.prefix, again.end_of_text) == ((2,), 1)


def ids_of(form):
    return range(own(form).vocab_size())


def test_no_text_becomes_a_special_token_and_a_template_writes_them():
    n = len(ids_of(LLAMA))
    added = {"<|end|>": {"id": n, "rstrip": True}, "<|user|>": {"id": n + 1}}
    tokenizer = SentencePieceTokenizer(trained(LLAMA), None, added)
    assert tokenizer.vocab_size == n + 2
    assert tokenizer.end_of_text == 2
    assert not {n, n + 1, 1, 2} & set(tokenizer.encode("<|end|><s></s><|user|>").tolist())
    message = escaped("say </s> and <|end|>", tokenizer.special_tokens)
    text = f"<s><|user|>{message}<|end|> \n ok</s>"
    ((ids, mask),) = tokenizer.encode_segments([[(text, True)]], is_rendered=True)
    plain = own(LLAMA).encode("say </s> and <|end|>")
    assert ids.tolist() == [1, n + 1, *plain, n, *own(LLAMA).encode("ok"), 2]
    assert mask.all()
    assert tokenizer.decode(ids) == "<s><|user|> say </s> and <|end|><|end|> ok</s>"


@pytest.mark.parametrize(("once", "before"), [(False, "▁"), (True, "")])
def test_a_space_is_put_before_each_text_or_the_first_alone(once, before):
    tokenizer = SentencePieceTokenizer(trained(LLAMA), spaces_once=once)
    theirs = own(LLAMA)
    ((ids, _),) = tokenizer.encode_segments([[("<s>cat</s>der 🙂", True)]], is_rendered=True)
    texts = [theirs.id_to_piece(int(each)) for each in ids]
    joined = "".join(texts[1:])
    assert joined.startswith(f"{before}cat</s>{before}der▁")
    assert joined.endswith("<0xF0><0x9F><0x99><0x82>")


@pytest.mark.parametrize("form", [GEMMA, INST])
def test_symbols_that_are_special_come_from_templates_alone(form):
    symbol = {GEMMA: "<start_of_turn>", INST: "[INST]"}[form]
    theirs = own(form)
    number = theirs.piece_to_id(symbol)
    plain = SentencePieceTokenizer(trained(form))
    assert number in plain.encode(f"a {symbol} b")  # as the model says
    tokenizer = SentencePieceTokenizer(trained(form), None, {symbol: {"id": number}})
    assert number not in tokenizer.encode(f"a {symbol} b")
    assert tokenizer.decode(tokenizer.encode("a I b")) == theirs.decode(theirs.encode("a I b"))
    text = f"{symbol}{escaped(f'a {symbol} b', [symbol])}"
    ((ids, _),) = tokenizer.encode_segments([[(text, True)]], is_rendered=True)
    assert ids.tolist().count(number) == 1
    assert ids[0] == number


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_masked_where_they_stand(form):
    tokenizer = SentencePieceTokenizer(trained(form))
    segments = [("Wo ist die Katze? ", False), ("Η γάτα κάθεται.", True), (" ja", False)]
    ((ids, mask),) = tokenizer.encode_segments([segments], is_rendered=True)
    assert ids.tolist() == own(form).encode("".join(text for text, _ in segments))
    assert "γάτα κάθεται" in tokenizer.decode(ids[mask])
    assert "Katze" not in tokenizer.decode(ids[mask])
    assert "ja" not in tokenizer.decode(ids[mask])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (b"", "not a model of SentencePiece"),
        (b"IQ== 0\nIg== 1\n", "tiktoken"),
        (b"\x0a\x05abcde", "not a model of SentencePiece"),
    ],
)
def test_another_kind_of_file_is_refused(model, said):
    with pytest.raises(CorruptError, match=said):
        SentencePieceTokenizer(model)


def test_a_normalizer_that_makes_gigabytes_is_refused():
    table = b"\x00\x00\x00\x00" + b"x" * (1 << 25) + b"\x00"
    field = b"\x12" + varint(len(table)) + table
    model = trained(BPE) + b"\x1a" + varint(len(field)) + field
    with pytest.raises((ConfigError, CorruptError)):
        SentencePieceTokenizer(model)


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match=r"pip install 'pentameter\[sentencepiece\]'"):
        SentencePieceTokenizer(trained(BPE))


@pytest.mark.parametrize(
    "change", [{"model": "?"}, {"end_of_text": "a"}, {"added": 3}, {"added": {"a": {}}}]
)
def test_a_damaged_file_is_refused(change):
    content = json.loads(SentencePieceTokenizer(trained(BPE)).to_bytes())
    with pytest.raises((CorruptError, ConfigError)):
        SentencePieceTokenizer.from_content({**content, **change})


def test_ids_outside_the_vocabulary_are_refused():
    tokenizer = SentencePieceTokenizer(trained(BPE))
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        tokenizer.decode(np.array([tokenizer.vocab_size]))
    with pytest.raises(ConfigError, match="are far beyond its"):
        SentencePieceTokenizer(trained(BPE), None, {"<a>": {"id": 10**9}})
