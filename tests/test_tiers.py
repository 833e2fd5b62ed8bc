"""The tiers of the tests."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def test_the_tier_that_ci_adds_names_tests_that_exist():
    there = {
        f"tests/{path.relative_to(TESTS)}::{node.name}"
        for path in TESTS.rglob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    named = TESTS.joinpath("more.txt").read_text(encoding="utf-8").splitlines()
    assert named == sorted(set(named))
    assert not set(named) - there, "write it anew: tests/kit/tiers.py"
