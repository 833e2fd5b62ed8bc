"""Readable size: files of at most 400 lines, functions of at most 60, and names that say something.

A file or function that outgrows this holds more than one idea: split it, do not raise the limit.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "pentameter"
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "manager", "misc", "common"}


def test_files_are_short():
    long = {
        str(path.relative_to(SOURCE)): n_lines
        for path in SOURCE.rglob("*.py")
        if (n_lines := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES_OF_A_FILE
    }
    assert not long


def test_functions_are_short():
    long = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                n_lines = node.end_lineno - node.lineno + 1
                if n_lines > MOST_LINES_OF_A_FUNCTION:
                    long[f"{path.relative_to(SOURCE)}:{node.name}"] = n_lines
    assert not long


def test_modules_are_named_for_what_they_hold():
    empty = [str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.py") if p.stem in EMPTY_NAMES]
    assert not empty
