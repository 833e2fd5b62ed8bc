import contextlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.data.tokenizers.bpe import BpeTokenizer
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.char import CharTokenizer, UnseenCharacterError
from pentameter.data.tokenizers.setting import load_tokenizer
from pentameter.data.tokenizers.word import WordTokenizer
from pentameter.errors import ConfigError, CorruptError, StorageError

any_text = st.text(st.characters(codec="utf-8"), min_size=1)


@given(any_text)
def test_every_text_comes_back(text):
    tokenizer = CharTokenizer(text)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(set(text))
    assert ids.tolist() == [sorted(set(text)).index(character) for character in text]


@given(any_text)
def test_the_file_gives_the_same_tokenizer(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer = CharTokenizer(text)
    tokenizer.save(path)
    assert path.read_bytes() == tokenizer.to_bytes()
    loaded = load_tokenizer(path)
    assert isinstance(loaded, CharTokenizer)
    assert loaded.characters == tokenizer.characters
    assert loaded.hash == tokenizer.hash


@given(any_text, any_text)
def test_unseen_characters_are_an_error(known, text):
    tokenizer = CharTokenizer(known)
    if set(text) <= set(known):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        return
    with pytest.raises(UnseenCharacterError) as error:
        tokenizer.encode(text)
    assert text[error.value.position] == error.value.character not in known


def test_the_error_names_character_code_point_and_place():
    with pytest.raises(ConfigError, match=r"'é' \(U\+00E9\) at position 3 .* vocabulary"):
        CharTokenizer("caf").encode("café")


def test_a_lone_surrogate_is_unseen_and_cannot_be_vocabulary():
    with pytest.raises(ConfigError, match=r"U\+D800"):
        CharTokenizer("abc").encode("a\ud800")
    with pytest.raises(ConfigError, match="not one Unicode character"):
        CharTokenizer("\ud800")


def test_empty_vocabulary_and_wrong_ids_are_refused():
    with pytest.raises(ConfigError, match="empty"):
        CharTokenizer("")
    for wrong in (-1, 2):
        with pytest.raises(ConfigError, match=f"id {wrong} at position 1"):
            CharTokenizer("ab").decode([0, wrong])
    assert CharTokenizer("ab").decode([]) == ""


def test_hash_is_of_the_vocabulary():
    assert CharTokenizer("abc").hash == CharTokenizer("cba").hash != CharTokenizer("abd").hash
    # Pinned: checkpoints and shards of earlier versions must keep their tokenizer.
    assert CharTokenizer("\n abé🙂").hash.startswith("1162095e921e4437")


CHAR = CharTokenizer("abc")
WORD = WordTokenizer(["<unk>", "the", "cat", "é"])
BPE = BpeTokenizer([*BYTE_CHARACTERS, "ab", "Ġab"], [("a", "b"), ("Ġ", "ab")])
KINDS = pytest.mark.parametrize("tokenizer", [CHAR, WORD, BPE], ids=["char", "word", "bpe"])


@KINDS
def test_every_kind_is_a_file(tmp_path, tokenizer):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    assert path.read_bytes() == tokenizer.to_bytes()
    assert path.read_bytes().isascii()
    loaded = load_tokenizer(path)
    assert type(loaded) is type(tokenizer)
    assert loaded.to_bytes() == tokenizer.to_bytes()
    assert loaded.kind == json.loads(path.read_bytes())["kind"]
    batch = [ids.tolist() for ids in loaded.encode_batch(["ab", "", "ab"])]
    assert batch == [tokenizer.encode(text).tolist() for text in ("ab", "", "ab")]
    with pytest.raises(StorageError, match="cannot write"):
        tokenizer.save(tmp_path / "absent" / "tokenizer.json")


@KINDS
def test_any_changed_byte_of_a_file_is_refused_or_means_nothing(tmp_path, tokenizer):
    path = tmp_path / "tokenizer.json"
    data = tokenizer.to_bytes()
    generator = np.random.default_rng(0)
    for place in generator.choice(len(data), size=80, replace=False):
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(generator.integers(7))
        path.write_bytes(damaged)
        with contextlib.suppress(CorruptError):
            # What still loads was damaged in the whitespace between its values.
            assert load_tokenizer(path).hash == tokenizer.hash


def edited(tokenizer=CHAR, **changes):
    content = json.loads(tokenizer.to_bytes())
    return json.dumps(content | changes).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a tokenizer"),
        (b"\x80\x04\x95", "not a tokenizer"),
        (b"[" * 100_000, "not a tokenizer"),
        (b'"pentameter-tokenizer"', "JSON object"),
        (b'{"model": {}}', '"format"'),
        (edited(version=2), "version 2"),
        (edited(kind="bpe"), '"tokens" is not a list'),
        (edited(kind="sentences"), "kind 'sentences' is not known .* char, word, bpe"),
        (edited(kind=["char"]), "not known"),
        (edited(characters="abc"), "list of single characters"),
        (edited(characters=["ab"]), "list of single characters"),
        (edited(characters=["b", "a"]), "sorted"),
        (edited(characters=[]), "empty"),
        (edited(characters=["\ud800"]), "not one Unicode character"),
        (edited(characters=["a", "b", "d"]), "damaged or was edited"),
        (edited(sha256=None), "damaged or was edited"),
        (edited(WORD, words="the"), "not a list of words"),
        (edited(WORD, words=["<unk>", 1]), "not a list of words"),
        (edited(WORD, words=["the", "<unk>"]), "first word"),
        (edited(WORD, words=["<unk>", "the", "the"]), "more than once"),
        (edited(WORD, words=["<unk>", "cat", "the", "é"]), "damaged or was edited"),
        (edited(BPE, tokens={"a": 0}), '"tokens" is not a list of strings'),
        (edited(BPE, tokens=[*BYTE_CHARACTERS, None]), '"tokens" is not a list of strings'),
        (edited(BPE, tokens=[*BYTE_CHARACTERS, "ab"]), r"'\\u0120ab' is not in the vocabulary"),
        (edited(BPE, tokens=[*BYTE_CHARACTERS, "ab", "Ġab", "ab"]), "more than once"),
        (edited(BPE, tokens=["ab", "Ġab"]), "lacks 256"),
        (edited(BPE, merges=["a b", "Ġab"]), "not two tokens"),
        (edited(BPE, merges=["a b", "Ġ a b"]), "not two tokens"),
        (edited(BPE, merges=[["a", "b"]]), '"merges" is not a list of strings'),
        (edited(BPE, merges=["a b"]), "damaged or was edited"),
    ],
)
def test_wrong_files_are_refused(tmp_path, data, message):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=message) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_a_matter_of_configuration(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_tokenizer(tmp_path / "no.json")
