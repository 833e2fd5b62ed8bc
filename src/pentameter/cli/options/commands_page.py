"""The reference page docs/commands.md, made from each verb's help."""

from __future__ import annotations

import contextlib
import inspect
import io
import re

from pentameter.cli.main import VERBS, main
from pentameter.errors import PentameterError

HEAD = """\
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


def commands_page() -> str:
    """Return docs/commands.md: the general help, each verb's help, and the exit codes."""
    parts = [HEAD, f"```\n{_help([])}\n```\n"]
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
