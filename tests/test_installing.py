"""What `make` and the image install, and what they say where nothing can be installed."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from pentameter.report.text.doctor import EXTRAS

ROOT = Path(__file__).parents[1]
CHECK = ROOT / ".ci" / "python_for_torch.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

spec = importlib.util.spec_from_file_location("python_for_torch", CHECK)
python_for_torch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(python_for_torch)


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (((3, 11), "Linux", "x86_64"), None),
        (((3, 14), "Linux", "aarch64"), None),
        (((3, 12), "Darwin", "arm64"), None),
        (((3, 10), "Linux", "aarch64"), "builds for Python 3.11 to 3.14, and this is 3.10"),
        (((3, 15), "Darwin", "arm64"), "builds for Python 3.11 to 3.14, and this is 3.15"),
        (((2, 7), "Linux", "x86_64"), "and this is 2.7"),
        (((3, 12), "Darwin", "x86_64"), "Apple Silicon, and this is a Python for Intel's"),
        (((3, 12), "Windows", "AMD64"), "inside WSL 2"),
        (((3, 12), "Linux", "armv7l"), "64-bit Linux on x86-64 and ARM"),
        (((3, 12), "FreeBSD", "amd64"), "this is 64-bit FreeBSD on amd64"),
        (((3, 12), "Linux", "x86_64", (2, 17)), "glibc 2.28 or newer, and this is 2.17"),
        (((3, 12), "Darwin", "arm64", (), (13, 6)), "macOS 14 or newer, and this is 13.6"),
        (((3, 12), "Linux", "x86_64", (2, 28), (), True), "and this is musl (Alpine?)"),
        (((3, 12), "Linux", "aarch64", (2, 28), (), False, 32), "this is 32-bit Linux on aarch64"),
    ],
)
def test_where_pytorch_has_no_build_a_sentence_says_so(machine, said):
    found = python_for_torch.obstacle(*machine)
    assert found is None if said is None else said in found


def test_old_pythons_can_read_the_check():
    nodes = list(ast.walk(ast.parse(CHECK.read_text())))
    young = (ast.JoinedStr, ast.NamedExpr, ast.AnnAssign, ast.Match)
    assert not [node for node in nodes if isinstance(node, young)]
    assert not [node for node in nodes if isinstance(node, ast.arg) and node.annotation]
    versions = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    pythons = {text.rpartition(" ")[2] for text in versions if "Python :: 3." in text}
    oldest, newest = (version[1] for version in python_for_torch.PYTHONS)
    assert pythons == {f"3.{minor}" for minor in range(oldest, newest + 1)}


@pytest.fixture
def make(tmp_path):
    """A function that runs `make WORDS`, with a stand-in for Python that notes what it is asked,
    and returns what pip was asked for and what make said. system: what `uname -sm` answers.
    pip_config: what `pip config list` does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    asked = tmp_path / "asked"
    stand_in = folder / "a-python"
    stand_in.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        '  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/pentameter";;\n'
        '  *"pip config list"*) echo "$PIP_CONFIGURED";;\n'
        f'  *) echo "$*" >> {asked};;\nesac\n'
    )
    stand_in.chmod(0o755)

    def run(*words, system="Linux x86_64", pip_config=""):
        (folder / "uname").write_text(f"#!/bin/sh\necho {system}\n")
        (folder / "uname").chmod(0o755)
        asked.write_text("")
        environment = {"PATH": f"{folder}:{os.environ['PATH']}", "PIP_CONFIGURED": pip_config}
        done = subprocess.run(
            ["make", "-C", ROOT, f"VENV={tmp_path / 'venv'}", "PYTHON=a-python", *words],
            env=environment, capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = asked.read_text().splitlines()
        return [line.partition("constraints.txt ")[2] for line in lines if "pip install" in line]

    return run


def test_a_first_run_needs_no_package_of_the_tests(make):
    assert make("quickstart") == ["-e .[serve]"]
    assert make("quickstart") == []
    assert make("install") == ["-e .[test]"]
    assert make("install", "quickstart") == []


def test_what_the_tests_need_is_enough_to_train(make):
    assert make("install") == ["-e .[test]"]
    assert make("quickstart") == []


@pytest.mark.parametrize(
    ("system", "pip_config", "words", "index"),
    [
        ("Linux x86_64", "", [], ""),
        ("Darwin arm64", "", [], ""),
        ("Linux aarch64", "global.cert='x'", [], f"--extra-index-url {CPU_INDEX} "),
        ("Linux aarch64", "global.index-url='x'", [], ""),  # a mirror, perhaps without network
        ("Linux aarch64", ":env:.find-links='x'", [], ""),
        ("Linux aarch64", "", ["TORCH_INDEX="], ""),
        ("Linux x86_64", "", ["TORCH_INDEX=file:///x"], "--extra-index-url file:///x "),
        ("Linux aarch64", "global.index-url='x'", ["TORCH_INDEX=a"], "--extra-index-url a "),
    ],
)
@pytest.mark.skipif(any(Path("/dev").glob("nv[ih]*")), reason="has an NVIDIA GPU")
def test_arm_on_linux_takes_builds_for_cpus(make, system, pip_config, words, index):
    asked = make("quickstart", *words, system=system, pip_config=pip_config)
    assert asked == [f"{index}-e .[serve]"]


def test_the_makefile_keeps_to_the_make_of_macos():
    """GNU make 3.81 knows none of these."""
    text = (ROOT / "Makefile").read_text()
    younger = r"!=|::=|\.ONESHELL|\$\(file |^undefine|^define \S+ *[:?+]?="
    assert re.findall(younger, re.sub(r"\[ [^]]+\]|^#.*", "", text), flags=re.MULTILINE) == []


def test_the_page_names_each_extra_and_what_it_says_of_versions_holds():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    table = page.split("## Extras")[1].split("\n## ")[0]
    named = {
        name for row in re.findall(r"^\| (`.+?) \|", table, re.M) for name in row.split("`")[1::2]
    }
    assert named == PROJECT["optional-dependencies"].keys()
    oldest, newest = (".".join(map(str, each)) for each in python_for_torch.PYTHONS)
    assert f"Python {oldest}\nto {newest}" in page
    (torch,) = (each for each in PROJECT["dependencies"] if each.startswith("torch"))
    assert f"Any torch from {torch.removeprefix('torch>=')} on" in page
    assert CPU_INDEX in page


def instructions(path: Path) -> list[tuple[str, str]]:
    """Word and arguments of each instruction of a Dockerfile; a `\\` continues a line."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


IMAGE = instructions(ROOT / "Dockerfile")


def test_every_extra_is_in_the_page_and_in_doctor():
    extras = PROJECT["optional-dependencies"].keys() - {"test", "dev"}
    assert extras == EXTRAS.keys()
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert not [extra for extra in extras if f"`{extra}`" not in page]


def test_the_image_has_extras_that_there_are():
    (extras,) = (each.removeprefix("EXTRAS=") for word, each in IMAGE if each[:7] == "EXTRAS=")
    assert {"serve", "parquet", "remote", "hub"} <= set(extras.split(","))
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys() - {"test", "dev"}
    assert "EXPOSE" not in dict(IMAGE)  # nothing listens until it is told to


def test_the_image_copies_what_is_let_through_to_it():
    let_through = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in let_through
    copied = [each.split()[:-1] for word, each in IMAGE if word == "COPY" and "--from" not in each]
    for name in [name for names in copied for name in names]:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in let_through, name
    stages = [each.partition(" AS ")[2] for word, each in IMAGE if word == "FROM"]
    taken = [each[len("--from=") :].split()[0] for _, each in IMAGE if each.startswith("--from=")]
    assert set(taken) <= set(stages)
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = {name for each in copied for name in each}
    assert {build["project"]["readme"], *build["project"]["license-files"]} <= names


def test_the_image_starts_the_command_as_a_user_without_rights():
    words = dict(IMAGE)
    (command,) = json.loads(words["ENTRYPOINT"])
    assert command in PROJECT["scripts"]
    assert words["USER"] in words["RUN"]  # the last RUN makes it
    pythons = {each.partition(" ")[0] for word, each in IMAGE if word == "FROM"}
    (python,) = (each.removeprefix("python:").removesuffix("-slim") for each in pythons)
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]


@pytest.mark.parametrize(
    ("index", "extras", "torch", "package"),
    [
        (
            "a/cpu",
            "serve,hub",
            "install -c c --index-url a/cpu torch",
            "install -c c x.whl[serve,hub]",
        ),
        ("", "", "install -c c torch", "install -c c x.whl"),
    ],
)
def test_the_image_installs_what_it_is_asked_to(tmp_path, index, extras, torch, package):
    """Its own words, run by a shell with a stand-in for pip."""
    (run,) = (each for word, each in IMAGE if word == "RUN" and "EXTRAS" in each)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "x.whl").touch()
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\necho "$@"\n')
    pip.chmod(0o755)
    run = run.replace("/tmp/constraints.txt", "c").replace("/tmp/wheels", str(wheels))
    done = subprocess.run(
        ["/bin/sh", "-ec", run], cwd=tmp_path, text=True, capture_output=True, check=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "TORCH_INDEX": index, "EXTRAS": extras},
    )  # fmt: skip
    said = done.stdout.replace("--no-cache-dir ", "").replace(f"{wheels}/", "").splitlines()
    assert said == [torch, package]
    assert not wheels.exists()
