"""An option that no verb has is refused in one line that names the ones it may have meant."""

import pytest

from pentameter.cli import main as cli


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sample runs/x --n 2", "did you mean --num-samples?"),
        ("sample runs/x -n 2", "did you mean --num-samples?"),
        ("sample runs/x --promt=a", "did you mean --prompt?"),
        ("compare a b --n 2", "--n is no option of `pentameter compare`; it has --out, --json"),
        ("prepare x --grammar.state 3", "did you mean --grammar.n-states?"),
        ("train quickstart --n 2", "did you mean --nproc or --name?"),
        ("verify quickstart --layout data=2", "did you mean --layouts?"),
    ],
)
def test_an_unknown_option_names_those_it_may_have_meant(line, said, capsys):
    assert cli.main(line.split()) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train quickstart --steps 2", "steps is no key; did you mean train.steps?"),
        ("sample nowhere --top_k 2", "nowhere does not exist"),
        ("sample nowhere --prompt -5", "nowhere does not exist"),
    ],
)
def test_other_arguments_are_left_to_the_verb(line, said, capsys):
    assert cli.main(line.split()) == 2
    assert said in capsys.readouterr().err
