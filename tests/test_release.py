"""A release: each step of its workflow, on a small package, and what ends it with a sentence."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
NO_BUILD = dict.fromkeys(("release.py build", "release.py try", "docker", "pip install"), "slow")


def loaded(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = loaded("release")
release_check = loaded("release_check")


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture
def source(tmp_path):
    """A repository with what the steps read: version 1.4.0.dev0, and what it brings."""
    folder = tmp_path / "source"
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "release.py", folder / ".ci")
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1.4.0.dev0"\n')
    (folder / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 1.4.0, not released yet\n\n### New\n\n- All ([page](docs/gpu.md)).\n\n"
        "## 1.3.0, 2026-01-02\n\n- Less.\n"
    )
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "All")
    git(folder, "tag", "v1.3.0")
    return folder


def rehearse(source: Path, place: Path):
    """A rehearsal of the workflow that was run, without what takes long; and what it said."""
    place.mkdir()
    said = []
    without = NO_BUILD | dict.fromkeys(release_check.LEAVES, "leaves")
    rehearsal = release_check.Rehearsal(place, said.append, without)
    rehearsal.make_origin(source)
    rehearsal.run(yaml.safe_load((WORKFLOWS / "release.yml").read_text(encoding="utf-8")))
    return rehearsal, said


def test_the_button_tags_a_dated_release_and_begins_the_next_version(source, tmp_path):
    (source / "uncommitted.txt").write_text("is released, too\n")
    rehearsal, said = rehearse(source, tmp_path / "place")
    assert not rehearsal.failed
    origin = rehearsal.origin
    assert git(origin, "tag").split() == ["v1.3.0", "v1.4.0"]
    assert git(origin, "cat-file", "-t", "v1.4.0").strip() == "tag"
    assert 'version = "1.4.0"\n' in git(origin, "show", "v1.4.0:pyproject.toml")
    released = git(origin, "show", "v1.4.0:CHANGELOG.md")
    assert re.search(r"^## 1\.4\.0, 20\d\d-\d\d-\d\d$", released, re.MULTILINE)
    assert "not released" not in released
    assert git(origin, "show", "v1.4.0:uncommitted.txt") == "is released, too\n"
    assert 'version = "1.5.0.dev0"\n' in git(origin, "show", "main:pyproject.toml")
    headings = re.findall(r"^## ([\d.]+), (not)?", git(origin, "show", "main:CHANGELOG.md"), re.M)
    assert headings == [("1.5.0", "not"), ("1.4.0", ""), ("1.3.0", "")]
    assert git(origin, "log", "--format=%s", "-3", "main").splitlines() == [
        "Begin 1.5.0.dev0", "Release 1.4.0", "The work tree",
    ]  # fmt: skip
    notes = (tmp_path / "place" / "page" / "notes.md").read_text()
    assert notes == (
        "### New\n\n- All ([page](https://github.com/OWNER/pentameter/blob/v1.4.0/docs/gpu.md)).\n"
    )
    for words in release_check.LEAVES:
        assert any(line.endswith("leaves") for line in said), words


def test_nothing_is_pushed_after_a_step_that_fails(source, tmp_path):
    (source / "CHANGELOG.md").write_text("## 1.4.0, not released yet\n\n## 1.3.0, 2026-01-02\n")
    rehearsal, said = rehearse(source, tmp_path / "place")
    assert len(rehearsal.failed) == 1
    assert rehearsal.failed[0].startswith("build: ")
    assert "tag: left out, as what it needs failed" in said
    assert git(rehearsal.origin, "tag").split() == ["v1.3.0"]


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("pyproject.toml", '[project]\nversion = "1.4.0"\n', "before a release it is X.Y.Z.dev0"),
        ("pyproject.toml", '[project]\nversion = "1.3.0.dev0"\n', "tag v1.3.0 is there already"),
        ("CHANGELOG.md", "## 1.4.0\n\n- All.\n", "one line '## 1.4.0, not released yet', and has"),
        ("CHANGELOG.md", "\n## 1.4.0, not released yet\n\n\n## 1.3.0, x\n", "says nothing under"),
    ],
)
def test_what_is_no_release_is_refused_in_a_sentence(source, file, text, said):
    (source / file).write_text(text)
    with pytest.raises(SystemExit, match=re.escape(said)):
        release.prepare(source, "2026-12-01")


def test_what_leads_into_the_repository_leads_there_from_elsewhere():
    text = "![a](docs/a.svg) [b](README.zh.md#x) [c](#c) [d](https://d.org) `f(x)[0](y z)`"
    assert release.absolute_links(text, "https://g.org/o/p", "1.0.0") == (
        "![a](https://g.org/o/p/raw/v1.0.0/docs/a.svg) "
        "[b](https://g.org/o/p/blob/v1.0.0/README.zh.md#x) [c](#c) [d](https://d.org) "
        "`f(x)[0](y z)`"
    )


def test_workflows_take_steps_that_there_are_and_nothing_is_released_unchecked():
    steps = set()
    for path in WORKFLOWS.glob("*.yml"):
        steps |= set(re.findall(r"\.ci/release\.py ([\w-]+)", path.read_text(encoding="utf-8")))
    assert {"prepare", "build", "try-wheel", "try-image", "begin", "notes"} == steps
    for step in steps:
        line = [sys.executable, ROOT / ".ci" / "release.py", step, "--help"]
        subprocess.run(line, check=True, capture_output=True)
    workflow = yaml.safe_load((WORKFLOWS / "release.yml").read_text(encoding="utf-8"))
    jobs = workflow["jobs"]
    assert jobs["tag"]["if"] == "inputs.publish"
    assert set(jobs["tag"]["needs"]) == {"checks", "build", "try", "image"}
    for name in ("index", "registry", "page"):  # what publishes comes after the tag
        needs = jobs[name]["needs"]
        assert "tag" in needs or "index" in needs, name
    # Started by hand is the release, not CI: machines that CI leaves out stay left out.
    ci = yaml.safe_load((WORKFLOWS / "ci.yml").read_text(encoding="utf-8"))
    assert "github.workflow == 'ci'" in ci["jobs"]["other-machines"]["if"]
    assert ci["name"] == "ci"
    writing = {name for name, job in jobs.items() if "permissions" in job}
    assert writing == {"tag", "index", "registry", "page"}


def test_an_installed_package_is_tried_as_a_stranger_would(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "empty"
    folder.mkdir()
    command = [sys.executable, "-m", "pentameter"]
    version = release.version_in(ROOT)
    release.trial(command, folder, version, [], release.free_port())
    assert "trains, samples, reports, plans, exports and serves" in capfd.readouterr().out
    with pytest.raises(SystemExit, match=r"not version 9\.9\.9"):
        release.trial(command, folder, "9.9.9", [], 0)


def test_an_image_gets_a_folder_and_a_port_and_its_server_lets_the_host_in(monkeypatch):
    tried = []
    monkeypatch.setattr(release, "trial", lambda *given: tried.append(given))
    release.try_image("an-image", "1.0.0")
    ((command, folder, version, served, port),) = tried
    assert command[:3] == ["docker", "run", "--rm"]
    assert command[-1] == "an-image"
    assert command[command.index("--volume") + 1] == f"{folder}:/work"
    assert command[command.index("--publish") + 1] == f"127.0.0.1:{port}:{port}"
    assert (version, served) == ("1.0.0", ["--host", "0.0.0.0"])
