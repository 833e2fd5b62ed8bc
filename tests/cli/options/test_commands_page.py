"""The page of commands is the help that the commands print."""

from pathlib import Path

from pentameter.cli.main import VERBS
from pentameter.cli.options.commands_page import commands_page

PAGE = Path(__file__).parents[3] / "docs" / "commands.md"


def test_the_page_of_commands_is_up_to_date(monkeypatch):
    monkeypatch.setenv("COLUMNS", "128")
    written = PAGE.read_text(encoding="utf-8")
    # Its words: where lines are broken differs by release of tyro.
    assert written.split() == commands_page().split(), "run `make docs`"
    assert [line[3:] for line in written.splitlines() if line.startswith("## ")] == [
        *VERBS,
        "Exit codes",
    ]
