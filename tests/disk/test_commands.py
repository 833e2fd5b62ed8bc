"""What another program says, or nothing."""

import os

import pytest

from pentameter.disk import commands
from pentameter.disk.commands import said_by


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo ' a b '", "a b"),
        ("printf '\\303\\244\\377'", "ä�"),
        ("echo a; exit 3", ""),
        ("echo a >&2", ""),
        ("cat", ""),  # nothing is on its stdin
        ("echo $LC_ALL $TZ", "C UTC"),
    ],
)
def test_what_it_prints_is_returned(script, said):
    assert said_by("sh", "-c", script) == said


def test_it_runs_in_a_folder(tmp_path):
    assert said_by("pwd", folder=tmp_path) == os.path.realpath(tmp_path)
    assert said_by("pwd", folder=tmp_path / "absent") == ""


def test_one_that_is_absent_or_slow_says_nothing(monkeypatch):
    assert said_by("no-such-program-of-anybody") == ""
    monkeypatch.setattr(commands, "_ANSWER_SECONDS", 0.05)
    assert said_by("sh", "-c", "echo a; exec sleep 60") == ""
