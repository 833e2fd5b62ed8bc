"""Temporary folders: gone with their process, or at the next start where that was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from pentameter.disk.lock import scratch_folder

HOLD = """
import sys
from pentameter.disk.lock import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_tmpdir(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which remembers it


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_what_a_killed_process_left_goes_and_what_is_in_use_stays(tmp_path):
    command = [sys.executable, "-c", HOLD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holders = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        folders = [holder.stdout.readline().strip() for holder in holders]
        (tmp_path / "pentameter-of-another-kind").mkdir()
        holders[0].kill()
        holders[0].wait()
        assert len(names(tmp_path)) == 3
        with scratch_folder() as own:
            (own / "file").write_text("x")
            assert names(tmp_path) == {
                own.name, folders[1].rpartition("/")[2], "pentameter-of-another-kind"
            }  # fmt: skip
    finally:
        for holder in holders:
            holder.communicate()
    assert names(tmp_path) == {"pentameter-of-another-kind"}


def test_a_folder_that_another_process_takes_before_it_is_locked_is_made_anew(
    tmp_path, monkeypatch
):
    real, made = tempfile.mkdtemp, []

    def mkdtemp(**options):
        made.append(real(**options))
        if len(made) == 1:
            subprocess.run(["rm", "-r", made[0]], check=True)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with scratch_folder() as own:
        assert str(own) == made[1]
    assert names(tmp_path) == set()
