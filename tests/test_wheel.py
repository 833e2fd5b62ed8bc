"""Wheel and sdist: what is in them, and that the wheel trains in an empty folder, with no compiler
or checkout."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)
BUILD = """
from setuptools import build_meta
build_meta.build_sdist("dist")
build_meta.build_wheel("dist")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, with the sdist beside it, built from a copy of what the image's Dockerfile copies:
    the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    copied = re.search(r"^COPY (.+) \./$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    for name in [*copied[1].split(), "MANIFEST.in"]:
        shutil.copy(ROOT / name, folder)
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=leave_out)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_something.py").touch()
    subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, timeout=300)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_wheel_and_sdist_have_every_file_of_the_package_and_nothing_else(wheel):
    assert release.strangers(ROOT, wheel.parent) == set()
    names = zipfile.ZipFile(wheel).namelist()
    for kind in ("config/presets/*.toml", "fused_cpu/cpp/*", "report/templates/*", "*/*.toml"):
        assert any(Path(name).match(f"pentameter/{kind}") for name in names), kind
    assert "py3-none-any" in wheel.name
    assert f"pentameter-{release.version_in(ROOT)}.dist-info/METADATA" in names


def test_a_file_that_only_the_wheel_lacks_is_named(wheel, tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src")
    (tmp_path / "src" / "pentameter" / "new.toml").touch()
    found = release.strangers(tmp_path, wheel.parent)
    assert found == {"pentameter/new.toml", "src/pentameter/new.toml"}


def test_the_wheel_trains_and_samples_without_a_compiler_or_a_checkout(wheel, tmp_path):
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=60)
    install = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install"]
    subprocess.run([*install, "-q", "--no-deps", "--no-index", wheel], check=True, timeout=120)
    (site,) = place.glob("lib/python*/site-packages")
    # Its dependencies are those of this environment, whose own .pth files, and so an editable
    # installation of this checkout, are not read from there.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    folder = tmp_path / "empty"
    folder.mkdir()
    environment = {
        "PATH": str(folder),
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "LANG": os.environ.get("LANG", "C.UTF-8"),
    }

    def run(program: str, *arguments: str) -> str:
        done = subprocess.run(
            [place / "bin" / program, *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = "import pentameter; print(pentameter.__file__)"
    assert Path(run("python", "-c", where).strip()).is_relative_to(site)
    said = run("pentameter", "train", "grammar", "--train.steps", "3", "--train.batch-size", "2")
    assert "completed" in said
    assert "no C++ compiler found" in run("pentameter", "doctor")
    assert (folder / "runs" / "grammar" / "report.html").is_file()
    assert run("pentameter", "sample", "runs/grammar", "--max-new-tokens", "8").strip()
