"""The wheel: what is in it, and that it trains in an empty folder, with no compiler or checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pentameter"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of what a source distribution has: the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=leave_out)
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*build, "--wheel-dir", "dist"], cwd=folder, check=True, timeout=300)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name for name in names if ".dist-info/" not in name}
    written = {
        str(path.relative_to(SOURCE.parent))
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packaged == written
    for kind in ("config/presets/*.toml", "fused_cpu/cpp/*", "report/templates/*", "*/*.toml"):
        assert any(Path(name).match(f"pentameter/{kind}") for name in packaged), kind
    assert "py3-none-any" in wheel.name
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"pentameter-{version}.dist-info/METADATA" in names


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
