"""What reaches the screen and log.txt."""

from pentameter.train.console import Console


def test_control_characters_of_a_sample_reach_no_terminal(tmp_path):
    with Console(quiet=True) as console:
        console.open_log(tmp_path / "log.txt")
        console.say("red \x1b[31m, bell \x07, tab \t, line\nnext")
    assert (tmp_path / "log.txt").read_text() == "red �[31m, bell �, tab \t, line\nnext\n"
