"""The reference page docs/events.md, made from the events' classes."""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import Any

from pentameter.record import events

HEAD = """\
# Events

<!-- Written by `make docs` from src/pentameter/record/events.py; do not edit. -->

For programs that read what a run has recorded. A run's `metrics.jsonl` has a JSON object a line:
its kind under `event`, the number of optimizer steps completed by then as `step`, the values below,
and the `time` at which it was written, in seconds since 1970 (UTC). NaN and infinity are `null`. A
hook's own kinds stand beside these. In Python, `read_events(folder).of(StepMetrics)` of
`pentameter.record.event_reader` gives objects of the classes that are named here.
"""


def events_page() -> str:
    """Return the Markdown text for docs/events.md: each kind of event with its keys, their types
    and meanings."""
    parts = [HEAD, _section("`start` and `resume`", events.RunStart)]
    for word, kind in events.KINDS.items():
        if kind not in (events.RunStart, events.RunResume):
            parts.append(_section(f"`{word}`", kind))
        if kind is events.EvalMetrics:
            parts.append(_section(f"`{word}`, of questions", events.ChoiceMetrics))
    return "\n".join(parts)


def _section(title: str, kind: Any) -> str:
    """Return the part of the page on one kind of event, without the keys of the class that it
    extends."""
    rows = ["| key | type | meaning |", "| --- | --- | --- |"]
    extended, meanings = kind.__base__, _meanings(kind)
    for name, of_type in events.recorded(kind).items():
        if name in events.recorded(extended):
            continue
        words = of_type.replace(" | None", " or null").replace("tuple[float, ...]", "list")
        rows.append(f"| `{name}` | {words} | {meanings.get(name, '')} |")
    about = f"`{kind.__name__}`: {' '.join((kind.__doc__ or '').split())}"
    if extended is not events.Event:
        about += f" These keys stand beside those of `{extended.__name__}`:"
    return "\n".join([f"## {title}", "", about, "", *rows, ""])


def _meanings(kind: type) -> dict[str, str]:
    """Return the docstring of each field, by its name: the string below it in the source."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        body = ast.parse(inspect.getsource(each)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return found
