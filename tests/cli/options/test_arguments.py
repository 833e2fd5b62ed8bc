"""An option that no verb has is refused in one line that names the ones it may have meant."""

import gc
import sys

import pytest

from pentameter.cli import main as cli
from pentameter.cli.options.arguments import importing, with_patterns
from pentameter.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sample runs/x --n 2", "did you mean --num-samples?"),
        ("sample runs/x -n 2", "did you mean --num-samples?"),
        ("sample runs/x --promt=a", "did you mean --prompt?"),
        ("compare a b --n 2", "--n is no option of `pentameter compare`; it has --out, --json"),
        ("prepare x --grammar.state 3", "did you mean --grammar.n-states?"),
        ("train quickstart --n 2", "did you mean --nproc or --nodes or --name?"),
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


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for name in (
        "part-00.parquet",
        "part-01.parquet",
        "part-10.parquet",
        "b.txt",
        "a.txt",
        "c[1].txt",
    ):
        (tmp_path / "corpus" / name).write_text("a")
    for name in ("a.toml", "b.toml"):
        (tmp_path / name).write_text("")


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (
            "quickstart --data.path corpus/part-00.parquet corpus/part-01.parquet "
            "corpus/part-10.parquet --name x",
            "quickstart --data.path corpus/part-*.parquet --name x",
        ),
        (
            "--data.path corpus/part-00.parquet corpus/part-01.parquet quickstart",
            "--data.path corpus/part-0*.parquet quickstart",
        ),
        ("corpus/a.txt corpus/b.txt corpus/c[1].txt", "corpus/*.txt"),
        ("corpus/a.txt --data.path corpus/b.txt", "corpus/a.txt --data.path corpus/b.txt"),
        ("corpus/a.txt corpus/part-00.parquet", "corpus/a.txt corpus/part-00.parquet"),
        ("a.toml b.toml none.txt nothing.txt", "a.toml b.toml none.txt nothing.txt"),
    ],
)
def test_files_that_a_shell_listed_become_their_pattern(corpus, line, kept):
    assert with_patterns(line.split()) == kept.split()


def test_files_that_no_pattern_lists_are_refused(corpus):
    with pytest.raises(ConfigError, match=r"write the pattern in quotes.*'corpus/\*\.txt'"):
        with_patterns(["corpus/a.txt", "corpus/c[1].txt"])
    with pytest.raises(ConfigError, match="write the pattern in quotes"):
        with_patterns([f"corpus/part-{n}.parquet" for n in ("01", "10")])


@pytest.mark.parametrize("is_first", [True, False])
def test_the_collector_is_off_during_imports_and_leaves_what_the_first_ones_made(
    monkeypatch, is_first
):
    gc.unfreeze()
    if is_first:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "torch", None)
    try:
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert (gc.get_freeze_count() > 0) == is_first
    finally:
        gc.unfreeze()
