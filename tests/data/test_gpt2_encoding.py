"""GPT-2's tokenizer against tiktoken's and transformers' over text that is hard to cut."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentameter.data.tokenizers.bpe import END_OF_TEXT, BpeTokenizer
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.setting import gpt2_tokenizer
from pentameter.disk.cache import known_files, public_file

GPT2_VOCABULARY = known_files()["gpt2-vocabulary"]
GPT2_MERGES = known_files()["gpt2-merges"]
FOLDER = Path(os.environ.get("PENTAMETER_DATA_DIR", "absent"))
pytestmark = pytest.mark.skipif(
    not (FOLDER / GPT2_MERGES.path).is_file(),
    reason=f"needs PENTAMETER_DATA_DIR with {GPT2_MERGES.path} and {GPT2_VOCABULARY.path}",
)

PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

HARD = [
    *("", " ", "  ", "\n", "\t", "\r\n", "\0", "\x7f\x80\x85\xa0", "a", " a", "a ", "  a  b   c  "),
    *("tab\tand\t\ttabs", "line\r\nline\r\r\n\n", "trailing \n", "\n\n\n x", " \n \n ", "a\u00a0b"),
    "it's I'm you're we've they'll he'd don't 'S 'T IT'S ''s 's's l'été",
    "x = {'a': [1, 2.5e-3], \"b\": None}\n\tif x!=y and not z: return f'{x:>8}'\n    # done\n",
    "1 12 123 1234567890 3.14159 1,000,000 0x1F 1e-9 ½ ² Ⅷ ٣ १२३ 一二三",
    "é e\u0301 n\u0303 \u0301lead Å A\u030a ﬁ ℌ Z\u0351\u036b\u0343\u036a\u0302",
    "中文没有空格。日本語の文章、カタカナ!한국어 텍스트 ไทยไม่มีช่องว่าง",
    "שלום עולם مرحبا بالعالم \u202eright to left\u202c नमस्ते",
    "👋🏽 👨‍👩‍👧‍👦 🏳️‍🌈 ☕️ 🇩🇪🇫🇷 1️⃣ ©®™",
    "\ud7ff\ue000\ufffd\ufffe\uffff\U00010000\U0010ffff\ufeff\u200b\u200d\u2028\u2029\u3000x",
    f"{END_OF_TEXT} a{END_OF_TEXT}b <|endoftext| >",
    "a" * 3000,
    "antidisestablishmentarianism" * 200,
    "!?" * 500 + "-" * 999 + "=" * 77,
    " " * 5000 + "x",
    "https://example.org/a-b_c?d=e&f=%20#g user@example.org C:\\path\\to",
    "".join(map(chr, range(0x250))),
]


@pytest.fixture(scope="module")
def ours() -> BpeTokenizer:
    return gpt2_tokenizer()


@pytest.fixture(scope="module")
def theirs() -> Any:
    """tiktoken's encoding, made from the same two files."""
    tiktoken = pytest.importorskip("tiktoken")
    vocabulary = json.loads(public_file(GPT2_VOCABULARY).read_bytes())
    end = vocabulary.pop(END_OF_TEXT)
    ranks = {bytes(BYTE_CHARACTERS[c] for c in token): rank for token, rank in vocabulary.items()}
    return tiktoken.Encoding(
        "gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: end}
    )


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Iterator[Any]:
    transformers = pytest.importorskip("transformers")
    vocabulary = json.loads(public_file(GPT2_VOCABULARY).read_bytes())
    merges = public_file(GPT2_MERGES).read_text(encoding="utf-8").splitlines()[1:]
    return transformers.GPT2TokenizerFast(
        vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges]
    )


def test_known_ids(ours: BpeTokenizer) -> None:
    assert ours.vocab_size == 50_257
    assert ours.end_of_text == 50_256
    assert ours.encode("Hello, world!").tolist() == [15496, 11, 995, 0]
    assert ours.encode(END_OF_TEXT).tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    # Pinned: checkpoints and shards of earlier versions must keep their tokenizer.
    assert ours.hash.startswith("808ae9c8c2c1400b")


@pytest.mark.parametrize("text", HARD, ids=lambda text: ascii(text[:16]))
def test_hard_text_as_tiktoken(ours: BpeTokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text).tolist()
    assert ids == theirs.encode_ordinary(text)
    assert ours.decode(ids) == text


def test_all_the_hard_text_at_once(ours: BpeTokenizer, theirs: Any) -> None:
    batch = [ids.tolist() for ids in ours.encode_batch(HARD)]
    assert batch == theirs.encode_ordinary_batch(HARD)
    whole = "\n".join(HARD) + " ".join(HARD)
    assert ours.encode(whole).tolist() == theirs.encode_ordinary(whole)


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.text(st.characters(codec="utf-8"), max_size=8),
            st.text("ab '\n\t\r1!é中<|\u00a0\u3000", max_size=12),
        )
    ).map("".join)
)
def test_any_text_as_tiktoken(ours: BpeTokenizer, theirs: Any, text: str) -> None:
    assert ours.encode(text).tolist() == theirs.encode_ordinary(text)


@given(st.lists(st.integers(0, 50_256)))
def test_any_ids_decode_as_tiktoken(ours: BpeTokenizer, theirs: Any, ids: list[int]) -> None:
    assert ours.decode(ids) == theirs.decode(ids)


@given(st.binary())
def test_any_bytes_decode_as_tiktoken(ours: BpeTokenizer, theirs: Any, raw: bytes) -> None:
    """Byte by byte, and so with characters cut, surrogates and overlong forms."""
    ids = [theirs.encode_single_token(bytes([byte])) for byte in raw]
    assert ours.decode(ids) == theirs.decode(ids) == raw.decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    "place", ["shakespeare/input.txt", "wikitext-2/valid.txt", "wikitext-2/test.txt"]
)
def test_a_whole_corpus_as_tiktoken(ours: BpeTokenizer, theirs: Any, place: str) -> None:
    if not (FOLDER / place).is_file():
        pytest.skip(f"needs PENTAMETER_DATA_DIR with {place}")
    text = (FOLDER / place).read_bytes().decode()
    ids = ours.encode(text)
    assert ids.tolist() == theirs.encode_ordinary(text)
    assert ours.decode(ids) == text


def test_hard_text_as_transformers(ours: BpeTokenizer, transformers_tokenizer: Any) -> None:
    for text in HARD:
        ids = ours.encode(text).tolist()
        assert ids == transformers_tokenizer.encode(text, split_special_tokens=True), ascii(text)
        if END_OF_TEXT not in text:
            assert ids == transformers_tokenizer.encode(text), ascii(text)
        decoded = transformers_tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert decoded == ours.decode(ids)
    assert transformers_tokenizer.eos_token_id == ours.end_of_text
