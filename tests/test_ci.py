"""What CI starts runs under the tools of a Mac, too: bash 3.2, which hands arguments on as it got
them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
YOUNGER = {
    "4.0": r"\b(mapfile|readarray|coproc)\b|declare -A|&>>|\|&|\$\{\w+[\^,]|\*\*/",
    "4.2": r"printf '%\(|\[\[ -v|declare -g",
    "4.3": r"\b(declare|local) -n\b|wait -n",
    "4.4": r"\$\{[\w@*]+@[A-Za-z]\}|\$\{[@*]@",
}
"""Release of bash → what is younger than macOS' 3.2."""


@pytest.mark.parametrize("arguments", [[], ["-x"], ["-k", "a and b", "tests/it's here"]])
def test_ci_hands_its_arguments_to_pytest(tmp_path, arguments):
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\n[ "$1" != lint ] || exit 0\nprintf %s "$2" > "$0.said"\n')
    make.chmod(0o755)
    subprocess.run(
        [ROOT / ".ci" / "run", *arguments], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True
    )
    said = (tmp_path / "make.said").read_text().removeprefix("PYTEST=")
    shown = subprocess.run(
        ["/bin/sh", "-c", f"printf '%s\\n' x {said}"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == ["x", *arguments]


def test_no_script_needs_a_younger_bash_than_a_mac_has():
    scripts = [ROOT / ".ci" / "run", *(ROOT / "examples").rglob("*.sh")]
    for path in scripts:
        for release, words in YOUNGER.items():
            found = re.search(words, path.read_text(encoding="utf-8"))
            assert not found, f"{path}: {found} is of bash {release}"


def test_the_rule_sees_what_stood_there():
    assert re.search(YOUNGER["4.4"], 'make test PYTEST="${*@Q}"')
