"""Functions on trees: nested dicts, lists, tuples and named tuples whose leaves are arrays, tensors
or any other values. A batch is such a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Tree = Any
"""An array or tensor (B, …), or a dict, list, tuple or named tuple of trees."""


def map_leaves(function: Callable[..., Any], tree: Tree) -> Tree:
    """Return a tree with the same structure and `function(leaf)` in place of each leaf."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, each) for each in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(function, each) for each in tree)
    return function(tree)


def named_leaves(tree: Tree, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) for each leaf, in order. A leaf's name is `name`, the tree's own, and the
    keys that lead to the leaf: `inputs['mask'][0]`."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from named_leaves(value, f"{name}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from named_leaves(value, f"{name}[{index}]")
    else:
        yield name, tree


def leaves(tree: Tree) -> list[Any]:
    """Return a tree's leaves in order."""
    return [leaf for _, leaf in named_leaves(tree, "")]
