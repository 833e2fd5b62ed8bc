"""`eval` beyond a plain pass: strides, multiple choice, other data."""

import json
import math
from pathlib import Path

import pytest
from cache_of_a_folder import cache_of_a_file  # noqa: F401

from pentameter.cli.main import main

SONG = "row row row your boat gently down the stream merrily merrily life is but a dream "
CONTEXT = 32
SETTINGS = [
    "--model.n-layers=1",
    "--model.d-model=32",
    "--model.attention.n-heads=2",
    f"--model.context-length={CONTEXT}",
    "--optimizer.learning-rate=1e-2",
    "--train.batch-size=8",
    "--train.steps=80",
    "--train.eval-interval=80",
    "--train.precision=fp32",
    "--train.compile=false",
    "--data.validation-fraction=0.1",
]
QUESTIONS = [
    {"ctx": "gently down the", "endings": ["stream", "boat", "dream"], "label": 0},
    {"context": "row row row your", "choices": ["dream", "boat"], "answer": "1"},
    {"context": "merrily merrily life is ", "choices": ["a", "row", "but a"], "answer": 2},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A model that knows a song by heart."""
    folder = tmp_path_factory.mktemp("runs")
    song = folder / "song.txt"
    song.write_text(SONG * 40)
    arguments = ["--data.path", str(song), "--run-dir", str(folder / "run"), *SETTINGS]
    assert main(["train", "grammar", *arguments]) == 0
    return folder / "run"


def evaluate(run, capsys, *arguments):
    assert main(["eval", str(run), "--precision", "fp64", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_text_is_found_from_another_folder(run, capsys):
    """As `data` and `replay` find it: a relative path is one from where the run was started."""
    expected = evaluate(run, capsys)
    text = run.parent / "song.txt"
    text.rename(run.parent / "moved.txt")
    try:
        found = evaluate(run, capsys)
        assert main(["eval", str(run), "--data.path", str(text)]) == 2  # what is asked for is read
    finally:
        (run.parent / "moved.txt").rename(text)
    assert found | {"seconds": 0} == expected | {"seconds": 0}


def questions(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_stride_counts_the_same_tokens_with_more_context(run, capsys):
    plain = evaluate(run, capsys)
    assert plain["stride"] == CONTEXT
    assert evaluate(run, capsys, "--stride", str(CONTEXT))["loss"] == plain["loss"]
    strided = evaluate(run, capsys, "--stride", "5")
    assert (strided["stride"], strided["tokens"]) == (5, plain["tokens"])
    assert strided["loss"] != plain["loss"]
    one = evaluate(run, capsys, "--stride", "5", "--batch-size", "3")
    assert one["loss"] == pytest.approx(strided["loss"], rel=1e-12)


def test_the_line_for_people_says_the_stride(run, capsys):
    assert main(["eval", str(run), "--stride", "5"]) == 0
    assert f"stride 5 of context {CONTEXT}" in capsys.readouterr().out


@pytest.mark.parametrize("stride", ["0", "-2", str(CONTEXT + 1)])
def test_a_stride_outside_the_context_exits_2(run, capsys, stride):
    assert main(["eval", str(run), f"--stride={stride}"]) == 2
    assert f"--stride {stride} must be in 1 … {CONTEXT}" in capsys.readouterr().err


def test_a_model_that_knows_the_song_answers_right(run, tmp_path, capsys):
    file = questions(tmp_path / "song.jsonl", *QUESTIONS)
    result = evaluate(run, capsys, "--multiple-choice", str(file))
    assert result.pop("seconds") > 0
    assert 0 < result["loss"] == pytest.approx(math.log(result.pop("perplexity")))
    loss, bits, tokens = (result.pop(key) for key in ("loss", "bits_per_byte", "tokens"))
    # As in lm-eval, the blank at a context's end is scored with the choice.
    assert tokens == len(" stream" + " boat" + " but a")
    assert bits == pytest.approx(loss / math.log(2) * tokens / len("stream" + "boat" + "but a"))
    assert result == {
        "step": 80,
        "file": str(file),
        "examples": 3,
        "accuracy": 1.0,
        "accuracy_per_token": 1.0,
        "accuracy_per_byte": 1.0,
    }
    assert main(["eval", str(run), "--multiple-choice", str(file)]) == 0
    said = capsys.readouterr().out
    assert "song.jsonl: accuracy 1.0000 · per token 1.0000 · per byte 1.0000 · loss 0." in said
    assert "nats/token of the right choices · 3 examples" in said


@pytest.mark.parametrize(
    ("record", "code", "says"),
    [
        ({"context": "row", "choices": ["boat", "BOAT"], "answer": 0}, 2, "'B'"),
        ({"context": "row", "choices": ["boat", "row " * 9], "answer": 0}, 2, "37 tokens"),
        ({"context": "row", "choices": ["boat", "dream"]}, 65, '"answer" is missing'),
    ],
)
def test_a_bad_question_is_named_by_its_line(run, tmp_path, capsys, record, code, says):
    file = questions(tmp_path / "song.jsonl", *QUESTIONS, record)
    assert main(["eval", str(run), "--multiple-choice", str(file)]) == code
    err = capsys.readouterr().err
    assert "song.jsonl:4: " in err
    assert says in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tasks", "arc_easy", "--stride", "5"], "leave out --stride"),
        (["--tasks", "arc_easy", "--data.path", "x.txt"], "leave out --data.path"),
        (["--tasks", "arc_easy", "--limit", "0"], "--limit 0 must be at least 1"),
        (["--limit", "5"], "--limit 5 is of --tasks"),
        (["--tasks", "arc_easy"], "pip install 'pentameter[lm-eval]'"),
    ],
)
def test_tasks_refuse_in_words(tmp_path, capsys, monkeypatch, options, says):
    monkeypatch.setattr("pentameter.cli.eval.find_spec", lambda name: None)
    assert main(["eval", str(tmp_path), *options]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("extra", [["--stride", "5"], ["--data.path", "x.txt"]])
def test_multiple_choice_takes_nothing_of_a_split(run, tmp_path, capsys, extra):
    file = questions(tmp_path / "song.jsonl", *QUESTIONS)
    assert main(["eval", str(run), "--multiple-choice", str(file), *extra]) == 2
    assert f"leave out {extra[0]}" in capsys.readouterr().err


def test_a_mistyped_data_key_is_answered_with_the_right_one(run, capsys):
    assert main(["eval", str(run), "--data.pth", "x"]) == 2
    assert "data.path" in capsys.readouterr().err


def test_a_hugging_face_folder_is_evaluated_on_the_text_it_is_given(run, tmp_path, capsys):
    folder = tmp_path / "hf"
    assert main(["export", str(run), "--to", "hf", "--out", str(folder)]) == 0
    capsys.readouterr()
    song = ["--data.path", str(run.parent / "song.txt")]
    exported, own = evaluate(folder, capsys, *song), evaluate(run, capsys)
    assert exported["loss"] == pytest.approx(own["loss"], rel=1e-12)
    assert exported["bits_per_byte"] == pytest.approx(own["bits_per_byte"], rel=1e-12)
    file = questions(tmp_path / "song.jsonl", *QUESTIONS)
    assert evaluate(folder, capsys, "--multiple-choice", str(file))["accuracy"] == 1.0
    assert main(["eval", str(folder)]) == 2
    assert "names no text: add --data.path FILE" in capsys.readouterr().err
