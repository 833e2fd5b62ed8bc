"""A tokenizer.json of another kind than ours: kept as it is, and given whole documents."""

import base64
import json

import numpy as np
import pytest
import tokenizers

from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.chunking import Chunker
from pentameter.data.tokenizers.library import Growth, LibraryTokenizer
from pentameter.data.tokenizers.setting import load_tokenizer
from pentameter.errors import ConfigError, CorruptError

WORDS = {"the": 0, "cat": 1, ".\n": 2, "?": 3}


def content():
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(r"[.]\n| "), "isolated"
    )
    library.add_special_tokens(["<end>"])
    library.enable_truncation(2)
    library.enable_padding(length=9)
    return json.loads(library.to_str())


def test_a_file_is_the_same_tokenizer(tmp_path):
    tokenizer: Tokenizer = LibraryTokenizer(content(), 4)
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert (again.hash, again.vocab_size, again.end_of_text) == (tokenizer.hash, 5, 4)
    ids = again.encode("the cat.\nthe<end>")
    assert ids.dtype == np.int64
    assert len(ids) == 5  # neither cut short nor filled up
    assert 4 not in ids
    assert again.encode_batch(["the", ""])[1].tolist() == []
    with pytest.raises(ConfigError, match="token id 5"):
        again.decode([5])


@pytest.mark.parametrize(
    ("whole", "end", "said"),
    [
        ({}, None, "the tokenizers library cannot open it"),
        (None, 9, "its end of text 9 is outside the vocabulary 0 … 4"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, None, "cannot open|empty"),
    ],
)
def test_what_the_library_does_not_take_is_refused(whole, end, said):
    with pytest.raises(ConfigError, match=said):
        LibraryTokenizer(content() if whole is None else whole, end)


def of_model(model, splitter=None, special=("</s>",), added=("zz",)):
    """Content with a model, its special tokens, and other tokens that are added to it."""
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = splitter
    library.add_special_tokens([*special])
    library.add_tokens([*added])
    return json.loads(library.to_str())


LETTERS = [(letter, -2.0) for letter in "▁ab<>/s"]
BPE = {each: n for n, each in enumerate(["<", "</", "</s>", "s>", "s", ">", "/", "a", "b", "§"])}
MERGES = [("<", "/"), ("s", ">"), ("</", "s>")]


@pytest.mark.parametrize(
    ("model", "splitter", "plain"),
    [
        (
            tokenizers.models.Unigram([("</s>", 0.0), ("<unk>", 0.0), *LETTERS], unk_id=1),
            tokenizers.pre_tokenizers.Metaspace(),
            ["▁", "a", "<", "/", "s", ">", "b", "zz", "▁", "<unk>", "a"],
        ),
        (
            tokenizers.models.WordPiece(
                {"</s>": 0, "<unk>": 1, "a": 2, "##<": 3, "##/s>b": 4}, unk_token="<unk>"
            ),
            tokenizers.pre_tokenizers.WhitespaceSplit(),
            ["a", "##<", "##/s>b", "zz", "<unk>"],
        ),
        (tokenizers.models.BPE(BPE, MERGES), None, ["a", "</", "s>", "b", "zz", "a"]),
        (
            tokenizers.models.BPE(BPE, MERGES, ignore_merges=True),
            None,
            ["a", "</", "s>", "b", "zz", "a"],
        ),
    ],
)
@pytest.mark.parametrize("is_special", [True, False])
def test_no_text_becomes_a_special_token_that_the_model_knows(model, splitter, plain, is_special):
    tokenizer = LibraryTokenizer(of_model(model, splitter, special=["</s>", "<unk>"]), None)
    number = tokenizer.special_tokens["</s>"]
    if not is_special:  # but it ends documents, as configurations of models say
        content = of_model(model, splitter, special=["<unk>"], added=["zz", "</s>"])
        tokenizer = LibraryTokenizer(content, number)
    first, untouched = tokenizer.encode_batch(["a</s>bzz ca", "azz"])
    assert [tokenizer.token(each) for each in first] == plain
    assert tokenizer.token(untouched[-1]) == "zz"
    for text in ("</s>", "</s></s>", " </s> "):
        assert number not in tokenizer.encode(text)


def test_a_special_token_of_one_character_is_no_text_either():
    content = of_model(tokenizers.models.BPE(BPE, MERGES), special=["§"])
    assert BPE["§"] not in LibraryTokenizer(content, None).encode("a§b")


def test_ids_of_special_tokens_are_those_of_the_library():
    content = of_model(tokenizers.models.BPE(BPE, MERGES), special=["<x>", "<y>"], added=[])
    content["added_tokens"][0]["content"] = ""  # which it leaves out, and numbers the others anew
    tokenizer = LibraryTokenizer(content, None)
    assert tokenizer.special_tokens == {"<y>": len(BPE)}
    assert tokenizer.token(len(BPE)) == "<y>"


def doubled(n_times, part="normalizer", text="a"):
    """Content whose normalizer or decoder doubles a text so many times."""
    step = {"type": "Replace", "pattern": {"String": text}, "content": text * 2}
    return content() | {part: {"type": "Sequence", f"{part}s": [step] * n_times}}


def replacing(*pairs):
    steps = [{"type": "Replace", "pattern": p, "content": c} for p, c in pairs]
    return {"type": "Sequence", "normalizers": steps}


def compiled(*replacements):
    """A table of SentencePiece, whose index is none."""
    table = (0).to_bytes(4, "little") + "\0".join(replacements).encode()
    return {
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode(table).decode(),
    }


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize("text", ["a", "ab"])
def test_a_file_that_makes_gigabytes_of_a_letter_is_refused(part, text):
    with pytest.raises(ConfigError, match=f"its {part} may make 17179869184 characters of one"):
        LibraryTokenizer(doubled(34, part, text), None)
    added = {"content": "aa", "id": 9, "special": False, "normalized": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    with pytest.raises(ConfigError, match=f"its {part} may make"):  # as it is opened
        LibraryTokenizer(doubled(34, part, text) | {"added_tokens": [added]}, None)


def test_a_text_that_would_become_too_long_is_refused():
    grown = LibraryTokenizer(doubled(12), None)
    assert len(grown.encode("a" * 10)) == 1
    assert len(grown.encode("the " * 1_000_000)) > 1
    with pytest.raises(ConfigError, match="normalizer may make 409600000 characters of 100000"):
        grown.encode("a" * 100_000)
    with pytest.raises(ConfigError, match="normalizer may make"):
        grown.encode_batch(["a" * 1_000] * 100)
    shown = LibraryTokenizer(doubled(16, "decoder", "cat"), None)
    assert shown.decode([1, 0]).count("cat") == 1 << 16
    with pytest.raises(ConfigError, match="decoder may make 196608000 characters of 3000"):
        shown.decode([1] * 1000)


REGEX_B, REGEX_EMPTY = {"Regex": "b"}, {"Regex": "(?=a)"}


@pytest.mark.parametrize(
    ("normalizer", "text", "most"),
    [
        (None, "abc", 3),
        (replacing(({"String": "&"}, "and"), ({"String": "%"}, "percent")), "a&%", 1 + 3 + 7),
        (replacing(({"String": "x"}, "yy"), ({"String": "y"}, "zz")), "xy", 4 + 2),
        (replacing(({"String": "xy"}, "yy"), ({"String": "y"}, "zz")), "xy", 2 + 2),
        (replacing(({"String": "b"}, "cc"), ({"String": "a"}, "bb")), "abc", 2 + 2 + 1),
        (replacing((REGEX_B, "cc"), ({"String": "c"}, "dd")), "abcb", 16),
        (replacing((REGEX_EMPTY, "x"), ({"Regex": r"\s+"}, " ")), "aaa", 7),
        (replacing(({"Regex": r" {2,}"}, "▁"), ({"Regex": r"\d"}, "0")), "a  1", 4),
        ({"type": "Prepend", "prepend": "▁"}, "abc", 4),
        ({"type": "Lowercase"}, "abc", 3),
        (compiled("a", "bcd"), "xy", 6),
        (
            {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, replacing(
                ({"String": "a"}, "aaaa")
            )]},
            "AA",
            8,
        ),
    ],
)  # fmt: skip
def test_growth_is_bounded_from_above(normalizer, text, most):
    assert Growth(normalizer).of([text]) == most
    if normalizer is not None and normalizer["type"] != "Precompiled":
        whole = tokenizers.Tokenizer.from_str(json.dumps(content() | {"normalizer": normalizer}))
        assert len(whole.normalizer.normalize_str(text)) <= most


def test_a_bound_of_many_steps_is_found_at_once():
    steps = [({"String": chr(n)}, "xx") for n in range(500, 20_500)]
    steps = [each for step in steps for each in (step, (REGEX_B, "y"))]
    growth = Growth(replacing(*steps))
    assert growth.of(["abc"]) >= 3


def test_what_panics_in_the_library_is_an_error_like_any_other():
    endless = content() | {"normalizer": replacing(({"Regex": "(a+)+$"}, "x"))}
    tokenizer = LibraryTokenizer(endless, None)
    assert len(tokenizer.encode("the")) == 1
    with pytest.raises(ConfigError, match=r"cannot encode a text: .*retry-limit"):
        tokenizer.encode("a" * 40 + "b")


@pytest.mark.parametrize("stored", [{}, {"tokenizer": []}, {"tokenizer": {}, "end_of_text": "x"}])
def test_damaged_content_is_refused(stored):
    with pytest.raises(CorruptError, match=r'"(tokenizer|end_of_text)" is'):
        LibraryTokenizer.from_content(stored)


def test_a_foreign_file_is_told_from_ours(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content()))
    with pytest.raises(CorruptError, match=r"`pentameter import` reads the tokenizer.json"):
        load_tokenizer(path)


def test_documents_are_not_cut_where_tokens_may_end_elsewhere():
    chunker = Chunker("library", longest=100)
    assert [chunker.feed("the cat.\n" * 10) for _ in range(1)] == [""]
    given = chunker.feed("the cat.\n" * 10)
    assert given + chunker.rest() == "the cat.\n" * 20
