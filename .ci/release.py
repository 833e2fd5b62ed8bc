"""The steps of a release, each a command, as `.github/workflows/release.yml` takes them.

`make release-check` takes them all in a temporary copy, and nothing leaves the machine. Needs git
and, to build and to try, uv; of Python the standard library alone. The version has one home,
pyproject.toml: there X.Y.Z.dev0 comes before X.Y.Z.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--train.steps=5", "--train.batch-size=4", "--data.max-bytes=200000"]
TORCH_IS_FOUND_BY = ("UV_TORCH_BACKEND", "UV_FIND_LINKS", "UV_INDEX", "UV_DEFAULT_INDEX")
"""Variables that tell uv where to look; without them a trial takes PyTorch's build for CPUs."""
PATIENCE_SECONDS = 300
"""How long a server may take to answer its first request: a container loads torch anew."""


def version_in(folder: Path) -> str:
    """Return the version that pyproject.toml has."""
    return str(tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"])


def unreleased(version: str) -> str:
    """Return the changelog's heading over what the next version brings."""
    return f"## {version}, not released yet"


def replace_once(path: Path, old: str, new: str) -> None:
    """Replace a whole line of a file; it must be there once."""
    lines = path.read_text(encoding="utf-8").split("\n")
    if lines.count(old) != 1:
        sys.exit(f"{path.name} must have one line {old!r}, and has {lines.count(old)}")
    lines[lines.index(old)] = new
    path.write_text("\n".join(lines), encoding="utf-8")


def prepare(folder: Path, date: str) -> str:
    """Make the folder the release's: the version without .dev0, and the changelog's section dated.

    Returns the version. Ends with a sentence where the version is no X.Y.Z.dev0, the tag is there
    already, or the changelog says nothing of it.
    """
    found = version_in(folder)
    version = found.removesuffix(".dev0")
    if version == found or not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"pyproject.toml has version {found}; before a release it is X.Y.Z.dev0")
    tags = subprocess.run(
        ["git", "tag", "--list", f"v{version}"],
        cwd=folder, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if tags.strip():
        sys.exit(f"tag v{version} is there already: set the next version in pyproject.toml")
    replace_once(folder / "pyproject.toml", f'version = "{found}"', f'version = "{version}"')
    replace_once(folder / "CHANGELOG.md", unreleased(version), f"## {version}, {date}")
    notes(folder)
    return version


def begin(folder: Path) -> str:
    """Begin the version after a release: the next minor one, with an empty section. Returns it."""
    released = version_in(folder)
    major, minor, _ = released.split(".")
    following = f"{major}.{int(minor) + 1}.0"
    replace_once(
        folder / "pyproject.toml", f'version = "{released}"', f'version = "{following}.dev0"'
    )
    changelog = folder / "CHANGELOG.md"
    (heading,) = re.findall(rf"^## {re.escape(released)},.*$", changelog.read_text(), re.MULTILINE)
    replace_once(changelog, heading, f"{unreleased(following)}\n\n{heading}")
    return f"{following}.dev0"


def notes(folder: Path) -> str:
    """Return the changelog's section of the version that the folder has; it must say something."""
    version = version_in(folder)
    text = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    _, found, rest = text.partition(f"\n## {version},")
    section = rest.partition("\n")[2].partition("\n## ")[0].strip()
    if not found or not section:
        sys.exit(f"CHANGELOG.md says nothing under its heading '## {version}, …'")
    return section


def absolute_links(text: str, repository: str, version: str) -> str:
    """Return Markdown whose links into the repository are URLs, for pages that lie elsewhere.

    repository: the URL of its page on GitHub.
    """

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match["picture"] else "blob"
        return f"{match['before']}({repository}/{kind}/v{version}/{match['target']})"

    link = r"(?P<before>(?P<picture>!?)\[[^\]]*\])\((?P<target>(?!\w+:|#)[^)\s]+)\)"
    return re.sub(link, absolute, text)


def build(folder: Path, out: Path, repository: str) -> None:
    """Build wheel and sdist into `out`, and hold both to the files of the package.

    Built from a copy, whose README leads to the repository: an index shows it by itself.
    """
    version = version_in(folder)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
            shutil.copy(folder / name, copy)
        leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(folder / "src", copy / "src", ignore=leave_out)
        readme = (copy / "README.md").read_text(encoding="utf-8")
        readme = absolute_links(readme, repository, version)
        (copy / "README.md").write_text(readme, encoding="utf-8")
        urls = f'[project.urls]\nRepository = "{repository}"\n'
        urls += f'Changelog = "{repository}/blob/v{version}/CHANGELOG.md"\n\n[project.scripts]'
        replace_once(copy / "pyproject.toml", "[project.scripts]", urls)
        subprocess.run(["uv", "build", "--quiet", "--out-dir", out.resolve(), copy], check=True)
    for strange in sorted(strangers(folder, out)):
        sys.exit(f"{strange} is in the package or in what was built of it, not in both")
    print(*sorted(path.name for path in out.glob("pentameter-*")), sep="\n")


def strangers(folder: Path, out: Path) -> set[str]:
    """Return what only one of package and wheel has, or only one of package and sdist."""
    package = folder / "src" / "pentameter"
    written = {
        str(path.relative_to(folder / "src"))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    beside = {"pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "setup.cfg"}
    in_sdist = {name for name in names - beside if ".egg-info/" not in name}
    return (written ^ in_wheel) | ({f"src/{name}" for name in written} ^ in_sdist)


def trial(command: list[str], folder: Path, version: str, served: list[str], port: int) -> None:
    """Try an installed pentameter as a stranger would: train, sample, report, plan, export, serve.

    command: what runs it, `["pentameter"]` for one on the path. folder: an empty one, its working
    directory. served: options of `serve`, which is asked at `port`.
    """

    def run(*words: str) -> str:
        print("$ pentameter", *words, flush=True)
        line = [*command, *words]
        done = subprocess.run(line, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{done.stdout}\npentameter {' '.join(words)} ended with {done.returncode}")
        return done.stdout

    told = run("--version").strip()
    if told != f"pentameter {version}":
        sys.exit(f"it is {told}, not version {version}")
    trained = run("train", "quickstart", *SMALL).splitlines()
    print(*(line for line in trained if line.startswith(("model", "ended"))), sep="\n")
    print(run("sample", "runs/quickstart", "--prompt", "def ", "--max-new-tokens", "20"))
    run("report", "runs/quickstart")
    run("plan", "gpt2-124m", "--cluster", "h100-80gb:8x1")
    run("export", "runs/quickstart", "--to", "safetensors", "--out", "exported")
    for written in ("runs/quickstart/report.html", "exported"):
        if not (folder / written).exists():
            sys.exit(f"no {written} was written")
    ask_server([*command, "serve", "runs/quickstart", "--port", str(port), *served], folder, port)
    print(f"pentameter {version} trains, samples, reports, plans, exports and serves")


def ask_server(line: list[str], folder: Path, port: int) -> None:
    """Start a server, have it write a text, and end it by SIGTERM, which it answers with 0."""
    print("$ pentameter serve runs/quickstart", flush=True)
    body = json.dumps({"prompt": "def ", "max_tokens": 8}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    server = subprocess.Popen(line, cwd=folder)
    try:
        latest = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                with urllib.request.urlopen(asked, timeout=PATIENCE_SECONDS) as answer:
                    print(json.load(answer)["choices"][0]["text"])
                break
            except (urllib.error.URLError, ConnectionError) as error:
                if server.poll() is not None or time.monotonic() > latest:
                    sys.exit(f"the server does not answer: {error}")
                time.sleep(0.5)
        server.send_signal(signal.SIGTERM)
        if server.wait(timeout=PATIENCE_SECONDS) != 0:
            sys.exit(f"serve ended with {server.returncode}")
    finally:
        server.kill()
        server.wait()


def try_wheel(out: Path, python: str, constraints: Path) -> None:
    """Try the wheel by `uvx`, in an environment that holds it and what it needs, nothing else.

    python: the version to try it with, 3.12. constraints: the file that names the torch to take.
    """
    (wheel,) = out.resolve().glob("*.whl")
    command = ["uvx", "--isolated", "--python", python, "--constraints", str(constraints)]
    if not any(os.environ.get(name) for name in TORCH_IS_FOUND_BY):
        command += ["--torch-backend", "cpu"]
    command += ["--from", f"{wheel}[serve]", "pentameter"]
    with tempfile.TemporaryDirectory() as folder:
        trial(command, Path(folder), wheel.name.split("-")[1], [], free_port())


def try_image(image: str, version: str) -> None:
    """Try an image, as its Dockerfile says: a folder of this user's, one port on this machine."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = ["docker", "run", "--rm", "--user", f"{os.getuid()}:{os.getgid()}"]
        command += ["--volume", f"{folder}:/work"]
        command += ["--publish", f"127.0.0.1:{port}:{port}", image]
        trial(command, Path(folder), version, ["--host", "0.0.0.0"], port)


def free_port() -> int:
    """Return a port of this machine on which nobody listens just now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def main() -> None:
    """Take one step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    steps = parser.add_subparsers(dest="step", required=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    steps.add_parser("prepare", help="set the version and date the changelog's section")
    steps.choices["prepare"].add_argument("--date", default=today)
    steps.add_parser("begin", help="after the release: begin the next version")
    for name, what in (("notes", "print the section of the changelog"), ("build", "into dist/")):
        steps.add_parser(name, help=what).add_argument("repository", help="the URL of its page")
    steps.add_parser("try-wheel", help="the wheel in dist/, by uvx")
    running = ".".join(map(str, sys.version_info[:2]))
    steps.choices["try-wheel"].add_argument("--python", default=running)
    steps.add_parser("try-image", help="by docker").add_argument("image")
    asked, out = parser.parse_args(), ROOT / "dist"
    version = version_in(ROOT)
    match asked.step:
        case "prepare":
            print(prepare(ROOT, asked.date))
        case "begin":
            print(begin(ROOT))
        case "notes":
            print(absolute_links(notes(ROOT), asked.repository, version))
        case "build":
            build(ROOT, out, asked.repository)
        case "try-wheel":
            try_wheel(out, asked.python, ROOT / "constraints.txt")
        case "try-image":
            try_image(asked.image, version)


if __name__ == "__main__":
    main()
