"""Readable size: at most 400 lines of code in a file, 150 in a class, 60 in a function; and names
that say what.

Docstrings, comments and blank lines are free: an explanation must never cost a line of code. What
outgrows this holds more than one idea: split it, do not raise the limit.
"""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from source_files import FEW_LINES, SOURCE, code_lines, file_imports, files, nodes, parsed

MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_CLASS = 150
MOST_LINES_OF_A_FUNCTION = 60
MOST_LINES_OF_THE_COMMAND_LINE = 2000
ALONE = {
    "data/tokenizers/word.py": "each kind of tokenizer has a file, and a test, of its name",
    "checkpoint/programs/table.py": "the command line only parses; a program is a line there",
    "verify/verify_model.py": "importing it imports torch, which the command's comparison does not",
    "parallel/links.py": "what trains sends nothing itself, and a mesh measures nothing",
    "parallel/memory/recomputed_attention.py": "importing it imports PyTorch's compiler",
    "train/say/recorder.py": "what a run records and what it says are two hooks",
    "checkpoint/hugging_face/weights/norms_from_zero.py": "each way to store tensors has a file",
    "parallel/memory/rounded_weights.py": "a rank that trials trace rounds its weights, too",
}
"""Small modules with one importer that stay files of their own, and why."""
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "manager", "misc", "common"}


def test_files_are_short():
    long = {
        str(path.relative_to(SOURCE)): n_lines
        for path in files()
        if (n_lines := len(code_lines(parsed(path)))) > MOST_LINES_OF_A_FILE
    }
    assert not long


@pytest.mark.parametrize(
    ("kinds", "most_lines"),
    [
        ((ast.ClassDef,), MOST_LINES_OF_A_CLASS),
        ((ast.FunctionDef, ast.AsyncFunctionDef), MOST_LINES_OF_A_FUNCTION),
    ],
    ids=["classes", "functions"],
)
def test_classes_and_functions_are_short(kinds, most_lines):
    long = {}
    for path in files():
        for node in nodes(path):
            if isinstance(node, kinds):
                n_lines = len(code_lines(node))
                if n_lines > most_lines:
                    long[f"{path.relative_to(SOURCE)}:{node.name}"] = n_lines
    assert not long


def test_the_command_line_only_parses_and_prints():
    """Its classes are the options of a verb; what is kept any longer has a room, for Python too."""
    of_cli = files(SOURCE / "cli")
    n_lines = sum(len(code_lines(parsed(path))) for path in of_cli)
    classes = [each for path in of_cli for each in nodes(path) if isinstance(each, ast.ClassDef)]
    kept = [
        each.name
        for each in classes
        if not each.name.endswith(("Arguments", "Options"))
        or any(isinstance(inside, ast.FunctionDef) for inside in each.body)
    ]
    assert n_lines <= MOST_LINES_OF_THE_COMMAND_LINE
    assert not kept


def test_docstrings_and_comments_are_free():
    docstring = '    """Say.\n\n    More.\n    """'
    source = f"def f(x):\n{docstring}\n    # why\n\n    return (\n        x\n    )\n"
    assert code_lines(ast.parse(source)) == {1, 8, 9}
    assert code_lines(ast.parse('X = 1\n"""Say.\nMore."""\n')) == {1}


def test_modules_are_named_for_what_they_hold():
    empty = [str(p.relative_to(SOURCE)) for p in files() if p.stem in EMPTY_NAMES]
    assert not empty


def test_small_modules_have_more_than_one_importer():
    imported = file_imports()
    importers = Counter(target for targets in imported.values() for target in targets)
    small = {
        str(path.relative_to(SOURCE))
        for path in imported
        if importers[path] == 1
        and path.stem != "__init__"
        and len(code_lines(parsed(path))) < FEW_LINES
    }
    assert small == ALONE.keys()
