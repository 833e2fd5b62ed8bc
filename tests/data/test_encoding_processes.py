"""Processes that encode text: they end with their work, and run nobody else's code."""

import os
import subprocess
import sys
import time

import pytest
from preparing import prepare, text_of_documents

from pentameter.data.prepare.encoders import encoded, processes_for
from pentameter.data.prepare.splits import Passage
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer, UnseenCharacterError
from pentameter.data.tokenizers.chunking import batches
from pentameter.errors import ConfigError, StorageError
from pentameter.machine import cores_and_memory as cores

TOKENIZER = train_bpe(["the quick brown fox jumps over the lazy dog"], 300)


def parts_of(texts):
    return [Passage(text, "train", True, True) for text in texts]


@pytest.fixture
def processes(monkeypatch):
    """The processes that were started, the first first."""
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_they_stop_when_the_caller_stops(processes):
    many = parts_of(["some words"] * 50)
    results = encoded(batches(many, 100, lambda part: len(part.text) + 16), TOKENIZER, 2)
    _, ids = next(results)
    assert ids[0].tolist() == TOKENIZER.encode("some words").tolist()
    results.close()
    assert [process.returncode for process in processes] == [-9, -9]


def test_they_leave_nothing_behind_when_the_caller_is_killed(tmp_path):
    script = (
        "import os, signal\n"
        "from pentameter.data.tokenizers.byte_level.training import train_bpe\n"
        "from pentameter.data.prepare.splits import Passage\n"
        "from pentameter.data.prepare.encoders import encoded\n"
        "batch = [Passage('some', 'train', True, True)]\n"
        "results = encoded([batch] * 9, train_bpe(['some words'], 260), 2)\n"
        "next(results)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        check=False,
    )
    assert done.returncode == -9
    deadline = time.monotonic() + 20
    while left := list((tmp_path / "tmp").iterdir()):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_a_lost_one_is_told_and_the_others_stop(processes):
    # More text than a pipe holds, so that some of it is still on its way.
    results = encoded(([part] for part in parts_of(["word " * 200_000] * 40)), TOKENIZER, 2)
    next(results)
    processes[0].kill()
    with pytest.raises(
        StorageError, match=r"a process that encoded text was killed by SIGKILL \(out of memory"
    ):
        list(results)
    assert [process.returncode for process in processes] == [-9, -9]


def test_one_that_cannot_start_stops_the_others(processes, monkeypatch):
    real = subprocess.Popen

    def start(*arguments, **settings):
        if processes:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(*arguments, **settings)

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(StorageError, match=r"cannot start .*Resource temporarily unavailable"):
        list(encoded([parts_of(["some words"])], TOKENIZER, 3))
    assert [process.returncode for process in processes] == [-9]


@pytest.mark.parametrize("name", ["tokenizers", "numpy", "pickle", "pentameter"])
def test_modules_in_the_current_folder_are_not_run(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("raise SystemExit('the planted module ran')\n")
    script = (
        "from pentameter.data.tokenizers.byte_level.training import train_bpe\n"
        "from pentameter.data.prepare.splits import Passage\n"
        "from pentameter.data.prepare.encoders import encoded\n"
        "tokenizer = train_bpe(['some words'], 260)\n"
        "(_, [ids]), = encoded([[Passage('some', 'train', True, True)]], tokenizer, 1)\n"
        "assert tokenizer.decode(ids) == 'some'\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_errors_cross_from_the_process_that_met_them(tmp_path):
    with pytest.raises(ConfigError, match="surrogate"):
        list(encoded([parts_of(["fine", "half \ud83d"])], TOKENIZER, 1))
    text = text_of_documents(lambda: iter([iter(["abab", "abz"])]), name="some")
    with pytest.raises(UnseenCharacterError, match="position 6 of the text 'some'") as error:
        prepare(text, tmp_path / "out", tokenizer=CharTokenizer("ab"), n_processes=1)
    assert (error.value.character, error.value.position) == ("z", 6)


def test_small_texts_and_characters_need_no_processes():
    assert processes_for(TOKENIZER, 10_000) == 0
    assert processes_for(CharTokenizer("ab"), 1 << 30) == 0


@pytest.mark.parametrize(("quota", "n_processes"), [(None, 64), (6.5, 6), (1.5, 0)])
def test_a_container_encodes_in_as_many_processes_as_it_has_time_for(
    monkeypatch, quota, n_processes
):
    monkeypatch.setattr(cores, "usable_cores", lambda: frozenset(range(64)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert processes_for(TOKENIZER, 1 << 30) == n_processes
