"""Words in the names of the package that the house gave up, and marks of conflicts in any file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from source_files import SOURCE, files, nodes

ROOT = Path(__file__).parents[1]

GIVEN_UP = {
    "traffic": "communication",
    "wording": "formatting",
    "proof": "verify",
    "blend": "mixture",
    "blended": "mixture",
    "supplied": "user components",
    "continuing": "resume",
    "share": "shard",
    "shared": "tied",
    "divided": "sharded",
    "place": "rank, coordinate, offset",
}
"""Word that no file, function or class has in its name → the word to use."""
TERMS = ("shared_expert", "in_place")
"""Terms of the field with such a word in them."""


def names() -> Iterator[tuple[str, str]]:
    """File and name of everything that the package defines, the files themselves included."""
    for path in files():
        where = str(path.relative_to(SOURCE))
        yield where, path.stem
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield where, node.name


def words_of(name: str) -> set[str]:
    """The words of a name, in snake or in camel case, in small letters, without those of TERMS."""
    for term in TERMS:
        name = name.replace(term, "")
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_words_of_names():
    assert words_of("_RankTraffic") == {"rank", "traffic"}
    assert words_of("gathered_parts_2d") == {"gathered", "parts", "d"}
    assert words_of("shared_expert_outputs") == {"outputs"}


def test_words_that_were_given_up_do_not_come_back():
    found = [
        f"{where}: {name}: say {GIVEN_UP[word]}"
        for where, name in names()
        for word in sorted(words_of(name) & GIVEN_UP.keys())
    ]
    assert not found, "\n".join(found)


def test_the_glossary_has_about_forty_words():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Words")[1]
    rows = [line for line in table.split("## ")[0].splitlines() if line.startswith("| ")]
    assert len(rows) - 2 >= 40


def test_private_names_of_torch_are_listed_with_what_is_missing():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = page.split("## Private names of PyTorch")[1].split("\n## ")[0]
    found = {
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r"\btorch(?:\.\w+)*\._[a-z]\w*", path.read_text(encoding="utf-8"))
    }
    assert found
    assert not [name for name in sorted(found) if name not in listed]


def test_no_file_holds_both_sides_of_a_conflict():
    places = ("*.md", "docs/**/*.md", "examples/**/*", "configs/*", "src/**/*", "tests/**/*")
    texts = (path for place in places for path in ROOT.glob(place) if path.is_file())
    conflict = re.compile(rb"^(<{7}|>{7}) ", re.MULTILINE)
    assert not [str(path) for path in texts if conflict.search(path.read_bytes())]
