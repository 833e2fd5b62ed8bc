"""What `data.tokenizer` may say, and the tokenizer it gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pentameter.data.tokenizers.bpe import END_OF_TEXT, BpeTokenizer
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.setting import (
    bpe_vocab_size,
    build_tokenizer,
    is_gpt2,
    known_vocab_size,
)
from pentameter.data.tokenizers.word import WordTokenizer
from pentameter.disk.cache import known_files
from pentameter.errors import ConfigError, StorageError

DOCUMENTS = ["The cat sat on the mat.\n", "The cat's hat sat on the cat.\n" * 40, "", "é 12 12"]
GPT2_MERGES = known_files()["gpt2-merges"]
FOLDER = Path(os.environ.get("PENTAMETER_DATA_DIR", "absent"))


def build(setting: str, documents: list[str] = DOCUMENTS, **options):
    return build_tokenizer(setting, lambda: iter(documents), **options)


def test_each_setting_gives_its_kind(tmp_path):
    char, word, bpe = build("char"), build("word"), build("bpe:270")
    assert isinstance(char, CharTokenizer)
    assert char.characters == tuple(sorted(set("".join(DOCUMENTS))))
    assert isinstance(word, WordTokenizer)
    assert word.words[:3] == ("<unk>", "the", "cat")
    assert isinstance(bpe, BpeTokenizer)
    assert bpe.vocab_size == 270
    for tokenizer in (char, word, bpe):
        path = tmp_path / f"{tokenizer.kind}.json"
        tokenizer.save(path)
        loaded = build(str(path), documents=[])
        assert type(loaded) is type(tokenizer)
        assert loaded.hash == tokenizer.hash


def test_trained_tokens_are_bytes_then_merges_then_the_end_of_text():
    tokenizer = train_bpe(DOCUMENTS, 280)
    assert tokenizer.tokens[:256] == tuple(BYTE_CHARACTERS)
    assert tokenizer.tokens[256:-1] == tuple("".join(merge) for merge in tokenizer.merges)
    assert tokenizer.tokens[-1] == END_OF_TEXT
    text = "".join(DOCUMENTS)
    assert len(tokenizer.encode(text)) < len(text.encode()) / 2


def test_the_smallest_vocabulary_is_bytes_and_the_end_of_text():
    tokenizer = build("bpe:257")
    assert tokenizer.vocab_size == 257
    assert tokenizer.merges == ()
    assert tokenizer.encode("é!").tolist() == [tokenizer.vocabulary[c] for c in "Ã©!"]


def test_a_special_token_is_none_although_its_text_is_frequent():
    tokenizer = train_bpe(["### one ### two ###\n"] * 9, 300, (END_OF_TEXT, "###"))
    mark = tokenizer.vocab_size - 1
    assert tokenizer.special_tokens == {END_OF_TEXT: mark - 1, "###": mark}
    assert mark not in tokenizer.encode("### one ###")


def test_a_text_too_small_for_its_size_gives_fewer_tokens_and_says_how_many():
    warnings: list[str] = []
    tokenizer = build("bpe:5000", warnings=warnings)
    assert 257 < tokenizer.vocab_size < 400
    assert len(warnings) == 1
    assert f"{tokenizer.vocab_size} tokens only" in warnings[0]
    assert build("bpe:270", warnings=warnings).vocab_size == 270
    assert len(warnings) == 1
    unpaired = build("bpe:400", documents=["abcdefg"])  # no pair occurs twice
    assert unpaired.vocab_size == 257


@pytest.mark.parametrize("run", ["acgt" * 60_000, " " * 200_000, "中" * 100_000])
def test_a_text_without_an_end_of_word_can_be_learned(run):
    tokenizer = train_bpe([f"a {run}\n{run}"], 300)
    assert len(tokenizer.encode(run)) < len(run.encode()) / 16
    assert tokenizer.decode(tokenizer.encode(run)) == run


def test_one_token_from_two_pairs_stands_once():
    # `aab` may come from (a, ab) and (aa, b); the library keeps both merges for one token.
    documents = ["aab " * 9 + "aaab " * 8 + "aaaab " * 5 + "ab " * 3 + "aa " * 4]
    tokenizer = train_bpe(documents, 300)
    assert len(set(tokenizer.tokens)) == tokenizer.vocab_size
    assert tokenizer.decode(tokenizer.encode(documents[0])) == documents[0]


def test_training_gives_the_same_in_every_process_with_any_threads_and_pieces():
    code = (
        "from pentameter.data.tokenizers.byte_level.training import train_bpe\n"
        "lines = [f'{i % 97} cat{i % 13}s sat{i % 7}\\n' for i in range(9000)]\n"
        "print(train_bpe(DOCUMENTS, 600).hash)"
    )
    hashes = set()
    for threads, documents in (
        ("1", "[''.join(lines)]"),
        ("3", "[''.join(lines)]"),
        ("2", "lines"),
    ):
        hashes.add(
            subprocess.run(
                [sys.executable, "-c", code.replace("DOCUMENTS", documents)],
                env={**os.environ, "RAYON_NUM_THREADS": threads},
                capture_output=True, text=True, check=True, timeout=60,
            ).stdout
        )  # fmt: skip
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("bpe:100", "at least 257"),
        ("bpe:256", "at least 257"),
        ("bpe:1048577", "at most 1048576"),
        ("bpe", "write it as bpe:8192"),
        ("bpe:", "write it as bpe:8192"),
        ("bpe:8k", "no vocabulary size"),
        ("bpe:-1", "no vocabulary size"),
        ("bpe:99999999999", "no vocabulary size"),
        ("bpe:٣٠٠", "no vocabulary size"),
    ],
)
def test_impossible_sizes_are_refused_before_any_text_is_read(setting, message):
    with pytest.raises(ConfigError, match=message):
        bpe_vocab_size(setting)
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(setting, lambda: pytest.fail("the text was read"))


def test_possible_settings():
    assert bpe_vocab_size("bpe:8192") == 8192
    for setting in ("char", "word", "gpt2", "bpe:257", "bpe:1048576", "some/file.json"):
        bpe_vocab_size(setting)


@pytest.mark.parametrize("setting", ["char", "word", "bpe:300"])
@pytest.mark.parametrize("documents", [[], [""]])
def test_no_text_is_refused(setting, documents):
    with pytest.raises(ConfigError, match="needs text"):
        build(setting, documents)


def test_a_missing_file_says_what_may_stand_there():
    with pytest.raises(ConfigError, match=r"absent\.json does not exist; .* bpe:8192"):
        build("absent.json")


def test_gpt2_without_its_files_says_what_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setenv("PENTAMETER_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def offline(*arguments, **options):
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    with pytest.raises(StorageError, match=r"\(sha256 196139668be63f3b.*\) at .*/gpt2-bpe/enc"):
        build("gpt2")


@pytest.mark.skipif(
    not (FOLDER / GPT2_MERGES.path).is_file(),
    reason=f"needs PENTAMETER_DATA_DIR with {GPT2_MERGES.path}",
)
def test_gpt2_needs_no_text():
    tokenizer = build("gpt2", documents=[])
    assert is_gpt2(tokenizer)
    assert tokenizer.vocab_size == known_vocab_size("gpt2")


def test_a_vocabulary_is_known_before_the_text_or_not_at_all(tmp_path):
    tokenizer = build("bpe:300")
    assert not is_gpt2(tokenizer)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert known_vocab_size(str(tmp_path / "tokenizer.json")) == tokenizer.vocab_size
    assert [known_vocab_size(setting) for setting in ("char", "word", "bpe:300")] == [None] * 3
    assert known_vocab_size("gpt2") == 50_257
    with pytest.raises(ConfigError, match="size must be at least"):
        known_vocab_size("bpe:3")
