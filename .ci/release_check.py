"""Takes the steps of `.github/workflows/release.yml` on this machine: `make release-check`.

Each job gets a checkout of its own, of a bare repository that stands in for the origin and holds
the work tree as it is. Its `run` steps are run as they stand; checkout, artifacts and the push
happen, among temporary folders. What would leave the machine is named and left out, and so is what
needs docker where none runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
LEAVES = ("docker push", "gh release", "gh-action-pypi-publish")
ONLY_THERE = {"actions/setup-python": "this Python", "./.github/workflows/ci.yml": ".ci/run"}
"""What GitHub's machines need and this one has, or does by another command."""


class Rehearsal:
    """One run of a workflow's jobs, in the order in which they stand.

    place: an empty folder. say: told a line for each step. without: words of a step that is left
    out → why.
    """

    def __init__(self, place: Path, say: Callable[[str], None], without: dict[str, str]):
        self.place, self.say, self.without = place, say, without
        self.origin = place / "origin.git"
        self.known = {
            "github.server_url": "https://github.com",
            "github.repository": "OWNER/pentameter",
            "github.ref": "refs/heads/main",
            "github.actor": "nobody",
            "github.token": "none",
            "secrets.GITHUB_TOKEN": "none",
            "matrix.python": ".".join(map(str, sys.version_info[:2])),
        }
        self.failed: list[str] = []

    def git(self, *words: str, cwd: Path | None = None) -> str:
        """Return what git answers; ends where it fails."""
        return subprocess.run(
            ["git", *words], cwd=cwd or self.place, capture_output=True, text=True, check=True
        ).stdout

    def make_origin(self, source: Path) -> None:
        """Make the origin: the source's commits and tags, and what lies there uncommitted."""
        self.git("clone", "--quiet", "--bare", str(source), str(self.origin))
        copy = self.place / "work-tree"
        self.git("clone", "--quiet", str(self.origin), str(copy))
        for name in self.git("ls-files", cwd=copy).splitlines():
            (copy / name).unlink()
        listed = self.git("ls-files", "-z", "-co", "--exclude-standard", cwd=source)
        for name in filter(None, listed.split("\0")):
            if (source / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / name, copy / name)
        self.git("checkout", "--quiet", "-B", "main", cwd=copy)
        self.git("add", "--all", cwd=copy)
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
        self.git(*who, "commit", "--quiet", "--allow-empty", "-m", "The work tree", cwd=copy)
        self.git("push", "--quiet", "--force", "origin", "HEAD:refs/heads/main", cwd=copy)

    def run(self, workflow: dict[str, Any]) -> None:
        """Take the jobs; after a step that fails, the rest of its job and all that need it."""
        unmet: set[str] = set()
        for name, job in workflow["jobs"].items():
            needs = job.get("needs", [])
            if unmet & set([needs] if isinstance(needs, str) else needs):
                self.say(f"{name}: left out, as what it needs failed")
                unmet.add(name)
                continue
            if "uses" in job:
                self.say(f"{name}: {job['uses']} is left out: {ONLY_THERE[job['uses']]} does it")
                continue
            if not self.run_job(name, job):
                unmet.add(name)

    def run_job(self, name: str, job: dict[str, Any]) -> bool:
        """Take one job's steps in a folder of its own; False where one failed."""
        folder = self.place / name
        for output in [key for key in self.known if key.startswith("steps.")]:
            del self.known[output]
        for step in job["steps"]:
            does = step.get("uses", step.get("run", ""))
            title = step.get("name") or does.strip().partition("\n")[0]
            reason = next((why for word, why in self.without.items() if word in does), None)
            if reason is not None:
                self.say(f"{name}: {title}: left out: {reason}")
            elif "uses" in step:
                self.use(folder, does.partition("@")[0], step.get("with", {}))
            elif not self.run_step(folder, step, f"{name}: {title}"):
                self.failed.append(f"{name}: {title}")
                return False
        for key, value in job.get("outputs", {}).items():
            self.known[f"needs.{name}.outputs.{key}"] = self.filled(value)
        return True

    def use(self, folder: Path, action: str, options: dict[str, Any]) -> None:
        """Do what an action does, among these folders."""
        artifact = self.place / "artifacts" / options.get("name", "")
        match action:
            case "actions/checkout":
                ref = self.filled(options.get("ref", "main"))
                self.git("clone", "--quiet", "--branch", ref, str(self.origin), str(folder))
            case "actions/upload-artifact":
                if (folder / options["path"]).is_dir():
                    shutil.copytree(folder / options["path"], artifact)
            case "actions/download-artifact":
                if artifact.is_dir():
                    shutil.copytree(artifact, folder / options["path"])
            case _:
                assert action in ONLY_THERE, f"what does {action} do?"

    def run_step(self, folder: Path, step: dict[str, Any], title: str) -> bool:
        """Run a step's script as GitHub's runner does; False where it fails."""
        self.say(f"{title} …")
        written = self.place / "outputs"
        written.write_text("")
        folder.mkdir(exist_ok=True)
        given = {key: self.filled(value) for key, value in step.get("env", {}).items()}
        given |= {"GITHUB_OUTPUT": str(written), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", self.filled(step["run"])],
            cwd=folder, env={**os.environ, **given}, check=False,
        )  # fmt: skip
        for line in written.read_text().splitlines():
            key, _, value = line.partition("=")
            self.known[f"steps.{step['id']}.outputs.{key}"] = value
        return done.returncode == 0

    def filled(self, text: str) -> str:
        """Return the text with the values of its expressions; an unknown one is an error."""
        return re.sub(r"\$\{\{ *([\w.]+) *\}\}", lambda match: self.known[match[1]], text)


def main() -> None:
    """Rehearse the release, and say what became of it."""
    without = dict.fromkeys(LEAVES, "it would leave this machine")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        without |= dict.fromkeys(("docker build", "try-image"), "no docker runs here")
    with tempfile.TemporaryDirectory() as temporary:
        rehearsal = Rehearsal(Path(temporary), lambda line: print(f"· {line}", flush=True), without)
        rehearsal.make_origin(ROOT)
        rehearsal.run(yaml.safe_load(WORKFLOW.read_text(encoding="utf-8")))
        print()
        print(rehearsal.git("log", "--oneline", "--decorate", "-3", "main", cwd=rehearsal.origin))
    if rehearsal.failed:
        sys.exit("failed: " + "; ".join(rehearsal.failed))
    print(
        "What can be tried here was tried. The button does it on GitHub: CONTRIBUTING.md, Release."
    )


if __name__ == "__main__":
    main()
