import json
import math
import re
import shutil
import subprocess
import sys
import threading

import pytest
from pages import check_page, text_of

from pentameter.cli import compare
from pentameter.cli.main import main
from pentameter.config.load import load_config
from pentameter.config.write import to_toml
from pentameter.errors import ConfigError
from pentameter.planning.plan import make_plan
from pentameter.report import reading
from pentameter.report.comparison import compare_runs, render_comparison
from pentameter.report.plots import LOSSES, overlay_figure, useful_axes


@pytest.fixture
def make_named(make_run, tmp_path):
    """`make_named(name, events, **overrides)`: a run folder tmp_path/name of the grammar preset."""

    def make(name, events, **overrides):
        keys = {"name": name, **{key.replace("__", "."): v for key, v in overrides.items()}}
        config = make_plan(load_config("grammar", keys), 16, 1000).portable_config
        made = make_run(events, config=to_toml(config))
        return shutil.move(made, tmp_path / name) and tmp_path / name

    return make


@pytest.fixture
def pair(make_named, run_events, run_end):
    """A finished run, and one of twice the tokens a step that a signal stopped."""
    events = run_events(400)
    a = make_named("a", [*events, run_end])
    half = run_events(200, tokens_per_step=512)
    for event in half:
        if event["event"] == "train":
            event["tokens"] *= 2
            event["loss"] += 1
        if event["event"] == "eval":
            event["loss"] += 1
    stop = {"event": "end", "step": 200, "reason": "SIGTERM", "seconds": 20.0}
    b = make_named("b", [*half, stop], optimizer__learning_rate=0.5, log__interval=3)
    return a, b


def rows(comparison):
    return {row.title: (row.cells, row.best) for row in comparison.rows}


def test_what_runs_came_to(pair):
    found = compare_runs(pair)
    table = rows(found)
    assert table["outcome"][0] == ("finished", "stopped")
    first, second = (run.record.best().loss for run in found.runs)
    assert table["best validation loss"] == ((f"{first:.4f}", f"{second:.4f}"), {0})
    assert table["steps"][0] == ("400 of 400", "200 of 200")
    assert table["tokens"][0] == ("102k", "102k")
    assert table["time"][0] == ("1 h 2 min", "20 s")
    assert table["tokens per second"] == (("2.56k", "2.56k"), set())  # equal: none is the best
    assert found.verdict == (
        f"a has the lowest validation loss: {first:.4f}, {second - first:.4f} below b."
    )


def scores(folder, *losses, precision="bf16", layouts=("data=1",)):
    """Write the metrics of a run with these validation losses, started once on each layout."""
    events = [
        {"event": "resume" if i else "start", "step": i, "layout": layout, "precision": precision}
        for i, layout in enumerate(layouts)
    ]
    for step, loss in enumerate(losses, 1):
        events.append(
            {"event": "eval", "step": step, "split": "val", "loss": loss,
             "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2)}
        )  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_rounding_crowns_no_winner(tmp_path):
    a, b = scores(tmp_path / "a", 1.4697), scores(tmp_path / "b", 1.4711)
    found = compare_runs([a, b])
    for title in ("best validation loss", "final validation loss", "perplexity", "bits per byte"):
        assert rows(found)[title][1] == set(), title
    assert found.verdict == (
        "a and b are equal in validation loss, as far as bf16 tells: 1.4697 and 1.4711."
    )
    scores(b, 1.4711, precision="fp32"), scores(a, 1.4697, precision="fp32")
    found = compare_runs([a, b])
    assert rows(found)["perplexity"][1] == {0}
    assert found.verdict == "a has the lowest validation loss: 1.4697, 0.0014 below b."
    scores(a, 1.4697), scores(b, 1.4711)  # both are better than a third one, by more than rounding
    found = compare_runs([a, b, scores(tmp_path / "c", 1.6)])
    assert rows(found)["best validation loss"][1] == {0, 1}


def test_cells_that_read_the_same_have_no_best(tmp_path):
    a = scores(tmp_path / "a", 2.00001, precision="fp32")
    b = scores(tmp_path / "b", 2.00004, precision="fp32")
    assert rows(compare_runs([a, b]))["best validation loss"] == (("2.0000", "2.0000"), set())


def test_each_layout_of_a_run_is_said(tmp_path):
    a = scores(tmp_path / "a", 2.0, layouts=("data=2,zero=3", "data=2,zero=3", "data=1"))
    b = scores(tmp_path / "b", 2.5, layouts=("data=1",))
    assert rows(compare_runs([a, b]))["layout"][0] == ("data=2,zero=3 → data=1", "data=1")


def test_only_settings_that_differ_are_listed_and_those_of_the_training_first(pair):
    assert compare_runs(pair).differing == {
        "optimizer.learning_rate": (load_config("grammar").optimizer.learning_rate, 0.5),
        "log.interval": (10, 3),
    }


def test_a_key_that_an_earlier_version_did_not_write_has_its_default(pair):
    path = pair[0] / "config.toml"
    path.write_text(re.sub(r"(?m)^(tensorboard|momentum) = .*\n", "", path.read_text()))
    assert "log.tensorboard" not in compare_runs(pair).differing


def test_losses_of_other_text_or_tokens_are_not_ranked_as_if_they_compared(
    make_named, run_events, run_end
):
    events = [*run_events(400), run_end]
    runs = [make_named("a", events), make_named("b", events, data__grammar__seed=5)]
    assert "different text (data.grammar.seed)" in compare_runs(runs).verdict
    better = [
        {**event, "bits_per_byte": 0.1} if event["event"] == "eval" else event for event in events
    ]
    runs = [runs[0], make_named("c", better, model__vocab_size=20)]
    assert compare_runs(runs).verdict.startswith("c has the lowest bits per byte, which compare")


def test_curves_lie_over_steps_tokens_and_time(pair):
    runs = [(run.label, run.record) for run in compare_runs(pair).runs]
    assert useful_axes(runs) == ["step", "tokens", "elapsed_seconds"]
    ends = {
        axis: [line.get_xdata()[-1] for line in figure.axes[0].get_lines()]
        for axis in useful_axes(runs)
        if (figure := overlay_figure("Validation loss", runs, axis=axis))
    }
    assert ends["step"] == [400, 200]
    assert ends["tokens"] == [400 * 256, 200 * 512]
    assert ends["elapsed_seconds"] == pytest.approx([40, 40])  # at 2,560 tokens a second
    assert useful_axes(runs[:1] * 2) == ["step", "elapsed_seconds"]


@pytest.mark.parametrize("loss", LOSSES)
def test_each_run_has_its_colour(pair, loss):
    runs = [(run.label, run.record) for run in compare_runs(pair).runs]
    lines = overlay_figure(loss, runs).axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["a", "b"]
    assert len({line.get_color() for line in lines}) == 2


def test_the_page_stands_alone(pair):
    page = check_page(render_comparison(compare_runs(pair)))
    text = text_of(page)
    for part in ("2 runs compared", "by tokens", "by time", "stopped", "Stopped by SIGTERM",
                 "learning_ rate", "0.5", "best validation loss"):  # fmt: skip
        assert part in text, part


def test_names_from_a_run_are_escaped(pair):
    config = pair[0] / "config.toml"
    evil = "<script>alert(1)</script>"
    config.write_text(config.read_text().replace('name = "a"', f'name = "{evil}"'))
    page = render_comparison(compare_runs(pair))
    assert page.count("<script") == 1
    assert "&lt;script&gt;alert(1)" in page


def test_runs_of_one_name_go_by_their_folders(pair, tmp_path):
    shutil.copytree(pair[0], tmp_path / "copy")
    found = compare_runs([pair[0], tmp_path / "copy"])
    assert [run.label for run in found.runs] == [str(pair[0]), str(tmp_path / "copy")]
    assert "are equal in validation loss" in found.verdict


def test_runs_of_which_little_is_known(pair, tmp_path):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text('{"event": "start", "step": 0}\n')
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.toml").write_text("name = [")
    found = compare_runs([*pair, tmp_path / "begun", tmp_path / "damaged"])
    assert rows(found)["outcome"][0][2:] == ("not started", "not started")
    assert found.differing.keys() == {"optimizer.learning_rate", "log.interval"}
    assert "</html>" in render_comparison(found)
    nothing = compare_runs([tmp_path / "begun", tmp_path / "damaged"])
    assert "No step has been logged yet" in render_comparison(nothing)


def test_the_command_prints_a_table_and_writes_the_page(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", str(pair[0]), str(pair[1])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["a", "b"]
    assert re.fullmatch(r"best validation loss +[\d.]+ \* +[\d.]+", lines[2])
    assert any(re.fullmatch(r"optimizer\.learning_rate +[\d.]+ +0\.5", line) for line in lines)
    assert lines[-1] == "compare.html"
    assert "2 runs compared" in (tmp_path / "compare.html").read_text(encoding="utf-8")


def test_many_runs_stand_in_groups_as_wide_as_the_terminal(pair, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert compare.run([*map(str, pair), "--out", str(pair[0] / "c.html")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.strip() in ("a", "b")] == [["a"], ["b"]]


def test_json_is_strict(pair, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert compare.run([*map(str, pair), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["page"] == str(out)
    assert [run["label"] for run in found["runs"]] == ["a", "b"]
    assert found["runs"][0]["tokens"] == 102_400
    assert found["settings"]["optimizer.learning_rate"][1] == 0.5


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a", "nowhere"], "nowhere: there is no such folder"),
        (["a", "."], r"holds no run: it has neither config.toml nor metrics.jsonl; the runs in it"),
        (["a"], "takes two runs or more"),
        (["a", "b", "a"], "a is named twice"),
    ],
)
def test_folders_that_cannot_be_compared(pair, tmp_path, capsys, names, words):
    folders = [tmp_path / name for name in names]
    with pytest.raises(ConfigError, match=words):
        compare_runs(folders)
    assert main(["compare", *map(str, folders)]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_comparing_needs_no_torch(pair, tmp_path):
    code = (
        "import sys\nfrom pentameter.cli import compare\n"
        f"compare.run([*{[*map(str, pair)]!r}, '--out', {str(tmp_path / 'c.html')!r}])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_locks_of_other_machines_are_watched_side_by_side(make_named, run_events, monkeypatch):
    """Each takes up to six seconds."""
    folders = [make_named(name, run_events(400)) for name in ("one", "two")]
    together = threading.Barrier(2)
    monkeypatch.setattr(reading, "is_held", lambda path: together.wait(timeout=30) >= 0)
    assert [run.outcome.label for run in compare_runs(folders).runs] == ["running", "running"]
