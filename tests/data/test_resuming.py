import subprocess
import sys

import numpy as np
import pytest

from pentameter.data.batches.dataset import Dataset
from pentameter.data.corpora.text import text_from_paths
from pentameter.data.prepare.contents import Splitting
from pentameter.data.prepare.prepare import prepare
from pentameter.data.shards.shards import open_shards
from pentameter.errors import StorageError

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "rests"]
SPLITTING = Splitting(0.2, 0.1, "document")

SCRIPT = """
import os, sys
from pathlib import Path
from pentameter.data.prepare.contents import Splitting
from pentameter.data.prepare.prepare import prepare
from pentameter.data.corpora.text import text_from_paths
at, tokenizer = int(sys.argv[3]), sys.argv[4]
calls = 0
def kill(stage, done, total):
    global calls
    calls += stage == "encoding"
    if calls == at:
        os.kill(os.getpid(), 9)
prepare(
    text_from_paths([Path(sys.argv[1])]), Path(sys.argv[2]), tokenizer=tokenizer, progress=kill,
    splitting=Splitting(0.2, 0.1, "document"), shard_tokens=150_000, note_seconds=0, n_processes=0,
)
"""


@pytest.fixture
def folder(tmp_path):
    """About 5 batches of text in 24 files."""
    rng = np.random.default_rng(0)
    (tmp_path / "text").mkdir()
    for number in range(24):
        words = rng.choice(WORDS, 20_000)
        (tmp_path / "text" / f"{number:02d}.txt").write_text(" ".join(words))
    return tmp_path / "text"


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed(folder, out, at, tokenizer):
    arguments = [sys.executable, "-c", SCRIPT, str(folder), str(out), str(at), tokenizer]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr


def again(folder, out, tokenizer, **settings):
    """How many bytes had been encoded at each sign of progress."""
    seen = []
    read_again = [0]

    def note(stage, done, total):
        if stage == "resuming":
            assert read_again[-1] <= done <= total
            read_again.append(done)
        if stage == "encoding":
            assert seen or done > read_again[-1]
            seen.append(done)

    defaults = {"splitting": SPLITTING, "shard_tokens": 150_000, "n_processes": 0}
    prepare(
        text_from_paths([folder]), out, tokenizer=tokenizer, progress=note, **defaults | settings
    )
    return seen


@pytest.mark.parametrize("tokenizer", ["char", "word", "bpe:300"])
def test_a_killed_preparation_goes_on_and_gives_the_same_bytes(folder, tmp_path, tokenizer):
    whole = tmp_path / "whole"
    steps = again(folder, whole, tokenizer)
    out = tmp_path / "out"
    for at in (3, 2):  # twice
        killed(folder, out, at, tokenizer)
        assert not out.exists()
        assert len(list(tmp_path.glob(".out.part-*"))) == 1
    rest = again(folder, out, tokenizer)
    assert rest == steps[-len(rest) :]
    assert len(rest) == len(steps) - 3  # two noted, then one more
    assert files(out) == files(whole)
    assert not list(tmp_path.glob(".*"))


def test_a_kill_before_anything_was_noted_or_other_text_starts_anew(folder, tmp_path):
    out = tmp_path / "out"
    killed(folder, out, 1, "char")
    steps = again(folder, tmp_path / "whole", "char")
    assert again(folder, out, "char") == steps
    second = tmp_path / "second"
    killed(folder, second, 5, "char")
    (folder / "00.txt").write_text("changed")
    assert again(folder, second, "char")[0] < 10
    third = tmp_path / "third"
    killed(folder, third, 5, "char")
    again(folder, third, "char", splitting=Splitting(0.0))  # other settings
    assert Dataset(open_shards(third / "text.json")).split("val").n_tokens == 0
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_keeps_what_was_noted(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def full(stage, done, total):
        if stage == "encoding" and done > 1_000_000:
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        prepare(
            text_from_paths([folder]), out, tokenizer="char", splitting=SPLITTING,
            shard_tokens=150_000, note_seconds=0, progress=full,
        )  # fmt: skip
    assert list(tmp_path.glob(".out.part-*"))
    assert again(folder, out, "char")[0] > 1_000_000


def test_what_is_read_again_is_told(folder, tmp_path):
    killed(folder, tmp_path / "out", 5, "char")
    told = []
    prepare(
        text_from_paths([folder]), tmp_path / "out", splitting=SPLITTING, shard_tokens=150_000,
        progress=lambda *progress: told.append(progress),
    )  # fmt: skip
    resuming = [(done, total) for stage, done, total in told if stage == "resuming"]
    assert len(resuming) == 4  # noted four times, a part each
    assert resuming[-1][0] == resuming[-1][1] > 0


def test_processes_give_what_one_gives(folder, tmp_path):
    assert again(folder, tmp_path / "one", "bpe:300") == again(
        folder, tmp_path / "two", "bpe:300", n_processes=2
    )
    assert files(tmp_path / "one") == files(tmp_path / "two")
