"""The files of the package as rules read them: trees, imports, lines of code. A file that several
rules read is parsed once."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "pentameter"
FEW_LINES = 60
"""Lines of code below which a module with a single importer belongs to its importer."""


@dataclass(frozen=True)
class Import:
    """One imported name; `at_top` where importing the module runs it, `for_types` where nothing
    but a type checker does."""

    module: str
    line: int
    at_top: bool
    for_types: bool


def files(source: Path = SOURCE) -> list[Path]:
    """The files of the package in `source`."""
    return sorted(source.rglob("*.py"))


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return _parsed(path.read_text(encoding="utf-8"))


def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree."""
    return _nodes(path.read_text(encoding="utf-8"))


# What is computed is kept by the text, as a test may write a file anew.
@cache
def _parsed(text: str) -> ast.Module:
    gc.disable()  # a tree has no circles, and makes enough objects to search all there are for them
    try:
        return ast.parse(text)
    finally:
        gc.enable()


@cache
def _nodes(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_parsed(text)))


def imports(path: Path, source: Path = SOURCE) -> tuple[Import, ...]:
    """Every import in the file, lazy ones and those for type checking included."""
    folder = ("pentameter", *path.relative_to(source).parts[:-1])
    return _imports(path.read_text(encoding="utf-8"), folder)


@cache
def _imports(text: str, folder: tuple[str, ...]) -> tuple[Import, ...]:
    return tuple(_imports_below(_parsed(text), folder, at_top=True, for_types=False))


def _imports_below(
    node: ast.AST, folder: tuple[str, ...], *, at_top: bool, for_types: bool
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            continue  # no import is in an expression
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_top, for_types)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, folder)
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, at_top, for_types)
        lazy = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from _imports_below(
            child,
            folder,
            at_top=at_top and not lazy and not types,
            for_types=for_types or types,
        )


def _absolute(node: ast.ImportFrom, folder: tuple[str, ...]) -> str:
    if not node.level:
        return node.module or ""
    base = folder[: len(folder) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def file_imports(source: Path = SOURCE) -> dict[Path, set[Path]]:
    """The files of the package that each file names: imported at its top, later or for a type
    checker alone, or in a string that another process resolves."""
    found = {}
    for path in files(source):
        modules = [item.module for item in imports(path, source)]
        modules += _named_in_strings(path)
        targets = {_file_of(module, source) for module in modules} - {None, path}
        found[path] = {target for target in targets if target is not None}
    return found


def _named_in_strings(path: Path) -> list[str]:
    """What the file's strings name as `pentameter.package.module` or `….module:function`."""
    strings = [
        node.value
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    found = [re.fullmatch(r"(pentameter(?:\.\w+)+)(?::(\w+))?", text) for text in strings]
    return [".".join(filter(None, each.groups())) for each in found if each is not None]


@cache
def _file_of(module: str, source: Path) -> Path | None:
    """The file that defines what `pentameter.a.b.name` imports; None outside the package."""
    root, *parts = module.split(".")
    if root != "pentameter":
        return None
    for length in (len(parts), len(parts) - 1):
        base = source.joinpath(*parts[:length])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


def circles(imported: dict[Path, set[Path]]) -> list[list[Path]]:
    """Groups of files that import each other, directly or by way of others (Tarjan 1972)."""
    number: dict[Path, int] = {}
    lowest: dict[Path, int] = {}
    stack: list[Path] = []
    found: list[list[Path]] = []

    def visit(path: Path) -> None:
        number[path] = lowest[path] = len(number)
        stack.append(path)
        for target in imported.get(path, ()):
            if target not in number:
                visit(target)
            if target in stack:
                lowest[path] = min(lowest[path], lowest[target])
        if lowest[path] == number[path]:
            group = stack[stack.index(path) :]
            del stack[stack.index(path) :]
            if len(group) > 1:
                found.append(sorted(group))

    for path in imported:
        if path not in number:
            visit(path)
    return found


def code_lines(tree: ast.AST) -> set[int]:
    """Lines of the source that hold code: no docstring, comment or blank line.

    A string that stands alone is a docstring, also that of an attribute or a constant (PEP 258).
    """
    docstrings = {
        id(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    lines: set[int] = set()
    todo = [tree]
    while todo:
        node = todo.pop()
        if id(node) in docstrings:
            continue
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.expr) or not children:
            first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
            if first is not None and last is not None:
                lines |= set(range(first, last + 1))
        elif hasattr(node, "lineno"):
            lines.add(node.lineno)
        todo += children
    return lines
