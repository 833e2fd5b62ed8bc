"""What reaches the screen and log.txt."""

from pentameter.train.console import Console


def test_control_characters_of_a_sample_reach_no_terminal(tmp_path):
    with Console(quiet=True) as console:
        console.open_log(tmp_path / "log.txt")
        console.say("red \x1b[31m, bell \x07, tab \t, line\nnext")
    assert (tmp_path / "log.txt").read_text() == "red �[31m, bell �, tab \t, line\nnext\n"


def test_preparing_without_a_terminal_says_a_line_now_and_then(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pentameter.data.progress.LINE_SECONDS", 0.0)
    with Console() as console:
        console.progress("reading", 1_000_000, 4_000_000)
        console.open_log(tmp_path / "log.txt")
    assert capsys.readouterr().out == "reading the text: 25% · 1 of 4 MB\n"
    assert (tmp_path / "log.txt").read_text() == "reading the text: 25% · 1 of 4 MB\n"


def test_preparing_on_a_terminal_is_the_live_line(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("pentameter.train.console.REFRESH_SECONDS", 0.0)
    with Console() as console:
        console.progress("verifying", 1_000_000, 4_000_000)
    assert "verifying the tokens · 1 MB of 4 MB · 25%" in capsys.readouterr().out
