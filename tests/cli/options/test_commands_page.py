"""The page of commands is the help that the commands print."""

from reference_pages import DOCS, commands_page

from pentameter.cli.main import VERBS


def test_the_page_of_commands_is_up_to_date(monkeypatch):
    monkeypatch.setenv("COLUMNS", "128")
    written = (DOCS / "commands.md").read_text(encoding="utf-8")
    # Its words: where lines are broken differs by release of tyro.
    assert written.split() == commands_page().split(), "run `make docs`"
    assert [line[3:] for line in written.splitlines() if line.startswith("## ")] == [
        *VERBS,
        "Exit codes",
    ]
