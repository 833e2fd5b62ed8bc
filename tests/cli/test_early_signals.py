"""A stop signal before training has begun: exit code 75, whatever is being imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

TRAIN = """
import sys
at, name = sys.argv[1:3]
sys.argv[1:] = ["train", "quickstart"]
import builtins, os, signal
real = builtins.__import__
def signalled(module, *rest, **named):
    if module == at:
        os.kill(os.getpid(), getattr(signal, name))
    return real(module, *rest, **named)
builtins.__import__ = signalled
import runpy
runpy.run_module("pentameter", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("at", "name"),
    [
        ("pentameter.cli.main", "SIGTERM"),
        ("pentameter.cli.main", "SIGINT"),
        ("pentameter.cli.main", "SIGUSR1"),
        ("pentameter.cli.main", "SIGHUP"),
        ("torch", "SIGINT"),
    ],
)
def test_a_signal_while_the_command_is_imported_ends_it_with_75(tmp_path, at, name):
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, at, name],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == os.EX_TEMPFAIL == 75
    assert done.stdout == ""
    said = f"stopped by {signal.Signals[name].name} outside of training; the same command goes on"
    first = "pentameter: reading quickstart …\n" if at == "torch" else ""
    assert done.stderr == f"{first}pentameter: {said}\n"
    assert list(tmp_path.iterdir()) == []
