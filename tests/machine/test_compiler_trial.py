"""A compiler is tried in the folder that a run will use, and what it builds is run there."""

import os
import subprocess
import sys

import pytest

TRIAL = """
import torch
from pentameter.machine.capabilities import find_compiler
found = find_compiler(torch.device("cpu"))
print(found.works, found.reason)
"""


def tried(folder, *before, **environment):
    """Return what the trial says in a new process whose temporary folder is `folder`."""
    kept = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [*before, sys.executable, "-c", TRIAL],
        env=kept | {"TMPDIR": str(folder)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_folder_with_a_blank_is_refused_with_the_way_out(tmp_path):
    folder = tmp_path / "t mp"
    folder.mkdir()
    said = tried(folder)
    assert said.startswith("False")
    assert f"set TORCHINDUCTOR_CACHE_DIR or TMPDIR, now {folder}/torchinductor_" in said


@pytest.mark.slow
def test_a_user_whose_name_has_a_blank_is_told(tmp_path):
    said = tried(tmp_path, LOGNAME="Ann Lee", USER="Ann Lee")
    assert said.startswith("False")
    assert f"{tmp_path}/torchinductor_Ann Lee, to a folder whose path has no blank" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"), [("noexec", "failed to map segment"), ("size=3m", "No space left")]
)
def test_a_disk_that_runs_nothing_or_is_full_is_told(tmp_path, options, said):
    mounted = f'mount -t tmpfs -o {options} tmpfs {tmp_path} && exec "$@"'
    before = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, "sh"]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may mount nothing")
    found = tried(tmp_path, *before)
    assert found.startswith("False")
    assert said in found


WITHOUT_OPENMP = """#!/bin/sh
case " $* " in
  *" -fopenmp "*) echo "clang++: error: unsupported option '-fopenmp'" >&2; exit 1 ;;
esac
exec g++ "$@"
"""


def test_a_compiler_without_openmp_as_apples_is_told_and_not_used(tmp_path):
    compiler = tmp_path / "clang++"
    compiler.write_text(WITHOUT_OPENMP)
    compiler.chmod(0o755)
    said = tried(tmp_path, CXX=str(compiler))
    assert said.startswith("False")
    assert "unsupported option '-fopenmp' (install OpenMP, on macOS by `brew" in said
