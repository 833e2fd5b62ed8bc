"""The house in figures: files, lines of code, circles, facts with two homes, words.

    python benchmarks/house.py [SOURCE] [--list]

SOURCE is the folder of the package (default: this checkout's). Code is counted without blank lines,
comments and docstrings, as `tests/test_source_size.py` counts it. `--list` names what is counted.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE / "tests" / "kit"))

from source_files import (  # noqa: E402
    FEW_LINES,
    SOURCE,
    circles,
    code_lines,
    file_imports,
    files,
    parsed,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", nargs="?", type=Path, default=SOURCE)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    source = options.source
    trees = {path: parsed(path) for path in files(source)}
    code = {path: len(code_lines(tree)) for path, tree in trees.items()}
    imported = file_imports(source)
    print_packages(source, code)
    importers = Counter(target for targets in imported.values() for target in targets)
    single = [path for path in trees if importers[path] == 1 and path.stem != "__init__"]
    found = {
        "files": list(map(str, trees)),
        "files in circles": [" ↔ ".join(map(str, circle)) for circle in circles(imported)],
        "modules with one importer": list(map(str, single)),
        f"… of them below {FEW_LINES} lines": [str(p) for p in single if code[p] < FEW_LINES],
        "public names defined in two files": names_defined_twice(trees),
        "private helpers used once": private_used_once(trees),
    }
    found |= {
        "places that replace a module's forward": assigned_forwards(trees),
        "files that name tensor_mode": files_with(source, "tensor_mode"),
        "files that name a sub-layer by string": files_with(source, *SUB_LAYERS),
        "mentions of the Triton kernels": mentions(source, r"(dropout_kernels|KernelAttention)\b"),
        "mentions of private torch names": mentions(source, r"\btorch(\.\w+)*\._[a-z]\w*"),
    }
    for what, names in found.items():
        print(f"{what:40}{len(names):7,}")
        if options.list and what != "files":
            print(*(f"    {name.replace(str(source) + '/', '')}" for name in names), sep="\n")
    print_words(trees, source)
    print_documents()


SUB_LAYERS = ("attention.qkv", "attention.out", "attention.kv", "mlp.up", "mlp.down", "mlp.gate")
COUNTED_WORDS = ("of", "where", "what")


def assigned_forwards(trees: dict[Path, ast.Module]) -> list[str]:
    """Assignments to an attribute `forward`."""
    return [
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr == "forward"
    ]


def files_with(source: Path, *words: str) -> list[str]:
    """Files of the package in which one of the words stands."""
    return [
        str(path)
        for path in sorted(source.rglob("*.py"))
        if any(word in path.read_text(encoding="utf-8") for word in words)
    ]


def mentions(source: Path, pattern: str) -> list[str]:
    """Lines of the package in which the pattern stands."""
    return [
        f"{path}:{number}"
        for path in sorted(source.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]


def print_documents() -> None:
    """Words of README, CHANGELOG and the pages of docs/, the longest pages by name."""
    pages = [HERE / "README.md", HERE / "CHANGELOG.md", *(HERE / "docs").rglob("*.md")]
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in pages}
    longest = sorted(words, key=lambda page: -words[page])[:5]
    print(f"\n{'words of documents':40}{sum(words.values()):7,}")
    print(*(f"    {page.relative_to(HERE)}: {words[page]:,}" for page in longest), sep="\n")


def print_words(trees: dict[Path, ast.Module], source: Path) -> None:
    """How often COUNTED_WORDS stand in 1,000 words of each package's docstrings."""
    words: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        parts = path.relative_to(source).parts
        for node in ast.walk(tree):
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                said = re.findall(r"[a-z']+", text.lower())
                words[parts[0] if len(parts) > 1 else "(root)"] += said
                words["total"] += said
    print(f"\n{'words of docstrings':20}{'all':>10}" + "".join(f"{w:>8}" for w in COUNTED_WORDS))
    for name in [*sorted(words.keys() - {"total"}), "total"]:
        rates = (1000 * words[name].count(word) / len(words[name]) for word in COUNTED_WORDS)
        print(f"{name:20}{len(words[name]):10,}" + "".join(f"{rate:8.1f}" for rate in rates))


def print_packages(source: Path, code: dict[Path, int]) -> None:
    """Files, lines and lines of code of each package."""
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path, n_code in code.items():
        parts = path.relative_to(source).parts
        package = parts[0] if len(parts) > 1 else "(root)"
        n_lines = len(path.read_text(encoding="utf-8").splitlines())
        for name in (package, "total"):
            rows[name] = [a + b for a, b in zip(rows[name], (1, n_lines, n_code), strict=True)]
    print(f"{'package':20}{'files':>8}{'lines':>10}{'code':>10}")
    for name in [*sorted(rows.keys() - {"total"}), "total"]:
        files, n_lines, n_code = rows[name]
        print(f"{name:20}{files:8,}{n_lines:10,}{n_code:10,}")


def names_defined_twice(trees: dict[Path, ast.Module]) -> list[str]:
    """Public functions and classes of one name in more than one file."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            if not node.name.startswith("_"):
                homes[node.name].append(f"{path.parent.name}/{path.name}")
    return [f"{name}: {', '.join(files)}" for name, files in homes.items() if len(files) > 1]


def private_used_once(trees: dict[Path, ast.Module]) -> list[str]:
    """Private functions of a module that are named once outside their definition."""
    found = []
    for path, tree in trees.items():
        uses = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        found += [
            f"{path}: {node.name}"
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and node.name.startswith("_")
            and uses[node.name] == 1
        ]
    return found


if __name__ == "__main__":
    main()
