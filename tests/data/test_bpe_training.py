"""Training of a BPE tokenizer: bounded on text without spaces, as before on any other."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import pytest
from preparing import prepare, text_of_documents

from pentameter.data.progress import MERGING, TRAINING
from pentameter.data.tokenizers.byte_level import training
from pentameter.data.tokenizers.byte_level.training import SeenWords, train_bpe
from pentameter.data.tokenizers.byte_level.words import Words
from pentameter.errors import StorageError

TEXT = "the cat sat on the mat, and the dog sat on the log. " * 40
DNA = "".join(random.Random(1).choices("ACGT", k=40_000))


def seen_words():
    import tokenizers

    return SeenWords(Words(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)))


def test_words_met_before_are_learned_from_and_later_new_ones_left_out(monkeypatch):
    monkeypatch.setattr(training, "MOST_WORD_BYTES", 3 * (training.WORD_BYTES + 4) - 1)
    seen = seen_words()
    texts = ["one two six", "ten one two", "one owl two two", " fox", "one two"]
    # The first text fills the room to its last byte; the others are cut at new words.
    assert list(seen.bounded(texts)) == [texts[0], " two", "one", " two two", "one two"]
    assert seen.n_left_out == 4  # "ten", " one", " owl", " fox"


def test_a_bound_that_is_not_met_changes_nothing_and_one_that_is_warns(monkeypatch):
    documents = [TEXT, *(DNA[at : at + 4000] for at in range(0, len(DNA), 4000)), TEXT]
    warnings: list[str] = []
    whole = train_bpe(documents, 500, warnings=warnings)
    assert not warnings
    monkeypatch.setattr(training, "MOST_WORD_BYTES", 1 << 16)
    assert train_bpe(documents, 500).hash == whole.hash
    monkeypatch.setattr(training, "MOST_WORD_BYTES", 1 << 13)
    bounded = train_bpe(documents, 500, warnings=warnings)
    assert bounded.hash == train_bpe([*documents[:3], TEXT], 500).hash != whole.hash
    assert "left out" in warnings[0]


def test_an_error_in_the_text_is_raised_as_it_is():
    def documents():
        yield TEXT
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError, match="gone"):
        train_bpe(documents(), 300)


def test_a_process_learns_the_same(monkeypatch):
    documents = [TEXT, "", DNA[:9000], "é" * 3000]
    here = train_bpe(documents, 400)
    monkeypatch.setattr(training, "WORTH_A_PROCESS_CHARACTERS", 1000)
    assert train_bpe(documents, 400).hash == here.hash


def test_a_process_that_is_lost_is_told(monkeypatch):
    monkeypatch.setattr(training, "WORTH_A_PROCESS_CHARACTERS", 1000)
    with pytest.raises(StorageError, match=r"the process that trains the tokenizer .*start again"):
        training._learned_in_a_process([[TEXT], ["half \ud83d"]], 300)


def test_progress_says_when_the_text_is_read(tmp_path):
    passes: list[str] = []
    text = text_of_documents(lambda: iter([iter([TEXT])]), name="some")
    prepare(
        text, tmp_path / "out", tokenizer="bpe:300", progress=lambda name, *_: passes.append(name)
    )
    assert passes.index(TRAINING) < passes.index(MERGING)
    assert passes.count(MERGING) == 1


def test_ctrl_c_ends_it_while_the_library_computes(tmp_path):
    """And nothing half-made is left."""
    (tmp_path / "dna.txt").write_text(
        DNA * 1 + "".join(random.Random(2).choices("ACGT", k=6_000_000))
    )
    (tmp_path / "cache").mkdir()
    command = [sys.executable, "-m", "pentameter", "prepare", str(tmp_path / "dna.txt")]
    process = subprocess.Popen(
        [*command, "--tokenizer", "bpe:8192", "--out", str(tmp_path / "out")],
        env={**os.environ, "PENTAMETER_CACHE_DIR": str(tmp_path / "cache")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "merging" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "dna.txt"]
