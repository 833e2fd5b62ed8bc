"""The reference pages in docs/, made from the schema, the help texts and the events' classes.

    COLUMNS=128 python tests/kit/reference_pages.py

writes them, as `make docs` does. Tests say when one is behind.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pentameter.cli.main import VERBS, main
from pentameter.config.fields import Leaf, leaves, sections, tables_of
from pentameter.config.files.write import section_summary, toml_value
from pentameter.config.section import ABSENT
from pentameter.errors import PentameterError
from pentameter.record import events

DOCS = Path(__file__).parents[2] / "docs"

EVENTS_HEAD = """\
# Events

<!-- Written by `make docs` from src/pentameter/record/events.py; do not edit. -->

For programs that read what a run has recorded. A run's `metrics.jsonl` has a JSON object a line:
its kind under `event`, the number of optimizer steps completed by then as `step`, the values below,
and the `time` at which it was written, in seconds since 1970 (UTC). NaN and infinity are `null`. A
hook's own kinds stand beside these. In Python, `read_events(folder).of(StepMetrics)` of
`pentameter.record.event_reader` gives objects of the classes that are named here.
"""

COMMANDS_HEAD = """\
# Commands

<!-- Written by `make docs` from the help texts; do not edit. -->

For who looks up a verb or an option. Every verb answers `--help`. MODEL is a run folder (its best
checkpoint, else its last), a checkpoint folder, a Hugging Face folder, or hf://OWNER/NAME, a model
on the Hugging Face Hub. Where a verb takes a preset or a file, every key of the
[configuration](configuration.md) is an option too: `--train.steps 500`.
"""

_SELF_EVIDENT = (
    r"\s+\(default:\s+(None|False)?\)"
    r"|(\n+ options)?\n +-h, --help +show this help message and exit(?=\n\n|$)"
    r"|\n +-h, --help +show this help message and exit"
)


def _row(*cells: str) -> str:
    """Format a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shown(default: Any) -> str:
    """Return a default as Markdown code: `none` for None, a dash if the key is required."""
    return f"`{ABSENT if default is None else '–' if default is ... else toml_value(default)}`"


def _taken(leaf: Leaf) -> str:
    """Return the values that a key takes, in words, for the reference page: shorter than in
    messages. A range of whole numbers is written as its ends; `none` is left out if it is the
    default."""
    words = re.sub(r"a whole number from (\S+) to ", r"\1 … ", leaf.expected)
    words = words.replace(" of at least 1 characters", "")
    return words.removesuffix(f" or {ABSENT}") if leaf.default is None else words


def configuration_page() -> str:
    """Return the Markdown text for docs/configuration.md: every section and key with default,
    accepted values and meaning."""
    lines = [
        "# Configuration",
        "",
        "<!-- Written by `make docs` from src/pentameter/config/schema.py; do not edit. -->",
        "",
        "For who looks up a key. A run is described by one TOML file, or by the name of a preset.",
        'A file may build on another: `extends = "shakespeare-char"` names a preset, or a file',
        "relative to its own folder. Every key can be set on the command line, `--section.key",
        'value`; hyphens and underscores are the same. `none` (in TOML `"none"`) stands for an',
        "absent value, which every key takes whose default it is, `0.9,0.99` for a pair; 1 … 9 is",
        "a whole number. An unknown key is refused with the nearest known one. The flat keys of",
        "`[model]` as 0.2 had them (`n_heads`, `d_ff`) are read as ever.",
        "",
        "`pentameter completion toml` prints a JSON schema for editors, `bash`, `zsh` or `fish`",
        "what completes keys and values on the command line ([how](commands.md#completion)).",
    ]
    for section, kind in sections().items():
        title = f"`[{section}]`" if section else "Top level"
        lines += ["", f"## {title}", "", section_summary(kind), ""]
        lines += ["| key | default | takes | meaning |", "| --- | --- | --- | --- |"]
        inside = [leaf for leaf in leaves().values() if leaf.section == section]
        for leaf in inside:
            meaning = " ".join(leaf.description.split())
            lines.append(_row(f"`{leaf.key}`", _shown(leaf.default), _taken(leaf), meaning))
        for leaf in filter(tables_of, inside):
            lines += ["", f"Each `[[{leaf.path}]]` has", "", "| key | default | meaning |"]
            lines.append("| --- | --- | --- |")
            for key, described in tables_of(leaf).items():
                meaning = " ".join(described.get("description", "").split())
                lines.append(_row(f"`{key}`", _shown(described.get("default", ...)), meaning))
    return "\n".join(lines) + "\n"


def events_page() -> str:
    """Return the Markdown text for docs/events.md: each kind of event with its keys, their types
    and meanings."""
    parts = [EVENTS_HEAD, _event_section("`start` and `resume`", events.RunStart)]
    for word, kind in events.KINDS.items():
        if kind not in (events.RunStart, events.RunResume):
            parts.append(_event_section(f"`{word}`", kind))
        if kind is events.EvalMetrics:
            parts.append(_event_section(f"`{word}`, of questions", events.ChoiceMetrics))
    return "\n".join(parts)


def _event_section(title: str, kind: Any) -> str:
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


def commands_page() -> str:
    """Return docs/commands.md: the general help, each verb's help, and the exit codes."""
    parts = [COMMANDS_HEAD, f"```\n{_help([])}\n```\n"]
    parts += [f"## {verb}\n\n```\n{_help([verb])}\n```\n" for verb in VERBS]
    parts.append("## Exit codes\n\n| code | means |\n| --- | --- |\n| 0 | Done. |")
    for kind in sorted(PentameterError.__subclasses__(), key=lambda kind: kind.exit_code):
        if kind.__module__ == PentameterError.__module__:
            parts.append(f"| {kind.exit_code} | {inspect.getdoc(kind)} |")
    return "\n".join(parts) + "\n"


def _help(verb: list[str]) -> str:
    """Return the text that `pentameter VERB --help` prints, COLUMNS wide; the general help for an
    empty `verb`. Frames and rulers are left out, since they differ between terminals and between
    tyro's releases. So are a verb's usage, which its arguments repeat, `--help` itself, and
    defaults that only say that an option may be absent."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([*verb, "--help"])
    lines = [re.sub(r"^│(.*)│$", r"\1", line).rstrip() for line in said.getvalue().splitlines()]
    text = "\n".join(line for line in lines if not re.fullmatch(r"\s*[-─╰╭╯╮]{2,}", line)).strip()
    return re.sub(_SELF_EVIDENT, "", text.partition("\n\n")[2] if verb else text)


PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration_page,
    "commands.md": commands_page,
    "events.md": events_page,
}
"""File in docs/ → what makes its text."""

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
