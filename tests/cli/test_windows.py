"""Windows, simulated by what its Python lacks: one sentence that names WSL 2, never a traceback."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from source_files import SOURCE, files, parsed

WINDOWS = """
import builtins, os, shutil, signal, sys, sysconfig  # shutil would look for Windows' own module
sysconfig.get_config_vars()  # later it would look for those of this platform
sys.platform = "win32"
absent = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"}
real = builtins.__import__
def imported(name, *rest, **named):
    if name in absent:
        raise ModuleNotFoundError(f"No module named {name!r}")
    return real(name, *rest, **named)
builtins.__import__ = imported
for name in absent:
    sys.modules.pop(name, None)
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGTSTP", "SIGCONT", "SIGALRM", "SIGKILL"):
    delattr(signal, name)
for name in ("fork", "getuid", "killpg", "statvfs", "O_NOFOLLOW", "O_CLOEXEC"):
    delattr(os, name)
"""
NEED_POSIX = {
    "disk/lock.py", "data/tokenizers/renderer.py", "train/compute.py", "machine/address.py",
}  # fmt: skip
"""Files that import at their top what Windows has not; what plans must not be among them."""
RUN = "import runpy; runpy.run_module('pentameter', run_name='__main__')"


def python(code: str, tmp_path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WINDOWS + code],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [["train", "quickstart"], ["doctor"], ["plan", "-x"]])
def test_a_command_is_refused_in_a_sentence(tmp_path, arguments):
    done = python(f"sys.argv[1:] = {arguments!r}\n{RUN}", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "WSL 2" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["Trainer", "load_model", "generate"])
def test_so_is_a_name_of_the_package(tmp_path, name):
    done = python(
        "import pentameter as pm\n"
        f"try:\n    pm.{name}\nexcept ImportError as error:\n    print(error)", tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WSL 2" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], ["completion", "bash"]])
def test_what_only_tells_works_there_too(tmp_path, arguments):
    done = python(f"sys.argv[1:] = {arguments!r}\n{RUN}", tmp_path)
    assert done.returncode == (0 if arguments else 2)
    assert done.stdout
    assert done.stderr == ""


def test_so_do_a_configuration_and_its_plan(tmp_path):
    done = python(
        "import pentameter as pm\nconfig = pm.load_config('quickstart', {'model.vocab_size': 99})\n"
        "print(pm.plan(config).n_parameters > 0)", tmp_path
    )  # fmt: skip
    assert "True" in done.stdout, done.stderr


def test_few_files_import_at_their_top_what_windows_lacks():
    found = set()
    for path in files():
        for node in parsed(path).body:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            if {"fcntl", "resource", "pwd", "grp", "termios"} & {*names}:
                found.add(path.relative_to(SOURCE).as_posix())
    assert found == NEED_POSIX
