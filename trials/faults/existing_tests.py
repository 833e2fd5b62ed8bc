"""Trials of the battery that are existing tests, run by pytest in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from trials.faults.trial import NotTriedError, Trial
from trials.programs import ROOT

LONGEST_SECONDS = 1800.0
"""Longest time of one call of pytest."""
GENERATED = "tests/config/test_config_generated.py"
N_GENERATED = 1300
"""Configurations, files and command lines that these tests draw in one call."""


@dataclass(frozen=True)
class Case:
    """A test case that was run. `wrong` says how it failed; None if it passed."""

    name: str
    wrong: str | None
    seconds: float


def run_cases(tests: Sequence[str], *options: str) -> list[Case]:
    """Run tests, given by pytest's names, slow ones too, and return their cases in order, without
    those that skip. Raises AssertionError, with what pytest said, if it does not end in time or
    finds a test missing or broken; NotTriedError if all cases skip."""
    with tempfile.TemporaryDirectory(prefix="pentameter-fault-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, f"--junit-xml={report}", *options, *tests],
            cwd=ROOT, check=False, timeout=LONGEST_SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode in (0, 1), f"pytest: exit code {done.returncode}: {done.stdout}"
        cases = list(ElementTree.parse(report).iter("testcase"))
    tried = [case for case in cases if case.find("skipped") is None]
    if not tried:
        raise NotTriedError("all cases are skipped")
    return [Case(case.get("name", ""), _wrong(case), float(case.get("time", 0))) for case in tried]


def _wrong(case: ElementTree.Element) -> str | None:
    """The message with which a case failed, None if it passed."""
    found = next((each for each in case if each.tag in ("failure", "error")), None)
    return None if found is None else (found.get("message") or found.text or found.tag)[:2000]


def generated_configurations(trial: Trial) -> str:
    """All tests of generated configurations, which draw other ones in each trial."""
    seed = trial.draw.randrange(2**32)
    for case in run_cases([GENERATED], "--hypothesis-profile=default", f"--hypothesis-seed={seed}"):
        assert case.wrong is None, f"{case.name}: {case.wrong}"
    return f"{N_GENERATED:,} of hypothesis's seed {seed}"
