import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from html import unescape

import pytest
from pages import check_page, text_of

from pentameter.cli import compare
from pentameter.cli.main import main
from pentameter.config.files.load import load_config
from pentameter.config.files.write import to_toml
from pentameter.errors import ConfigError
from pentameter.planning.plan import make_plan
from pentameter.record import reading
from pentameter.record.reading import read_run
from pentameter.record.results import results
from pentameter.report.figures import markup
from pentameter.report.figures.plots import (
    BITS,
    LOSSES,
    PAGE,
    RUN_STYLES,
    hides_start,
    overlay_figure,
    useful_axes,
)
from pentameter.report.pages.page import render_page
from pentameter.report.watch.comparison import compare_runs, render_comparison
from pentameter.report.watch.ranking import STUDENT_T, UNKNOWN_NOISE


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


def columns(comparison):
    return {column.title: column.cells for column in comparison.columns}


def leaders(comparison):
    return sorted(comparison.ranking.leaders)


def test_further_evaluations_have_columns(make_named, run_events, run_end):
    arc = {"event": "eval", "split": "arc", "loss": 3.0}
    best = run_events(400)
    step = min((e for e in best if e["event"] == "eval"), key=lambda e: e["loss"])["step"]
    a = make_named("a", [*best, {**arc, "step": step, "accuracy": 0.625}, run_end])
    news = [{"name": "news", "path": "news.txt"}]
    b = make_named("b", [*run_events(400), run_end], data__evaluations=news)
    found = compare_runs([a, b])
    assert columns(found)["arc accuracy"] == ("0.6250", "–")
    assert found.ranking.is_ranked  # the text of validation is the same


def test_what_runs_came_to(pair):
    found = compare_runs(pair[::-1])  # the order of the shell does not count
    assert [run.label for run in found.runs] == ["a", "b"]
    table = columns(found)
    assert list(table)[:3] == ["best validation loss", "state", "optimizer.learning_rate"]
    assert table["state"] == ("finished", "stopped")
    first, second = (run.record.best().loss for run in found.runs)
    assert table["best validation loss"] == (f"{first:.4f}", f"{second:.4f}")
    assert table["steps"] == ("400 of 400", "200 of 200")
    assert ("tokens seen", "102k") in found.alike  # a column only where they differ
    assert table["time"] == ("1 h 2 min", "20 s")
    assert ("parameters", "10,745,088") in found.alike
    assert leaders(found) == ["a"]
    assert found.ranking.verdict == (
        f"a has the lowest validation loss: {first:.4f}, {second - first:.4f} below b, "
        "with one seed each."
    )
    assert found.ranking.noise.startswith("Noise is unknown: no two finished runs differ")


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
    """bf16 tells losses 0.4 % apart no further than the order of sums."""
    a, b = scores(tmp_path / "a", 1.4697), scores(tmp_path / "b", 1.4725)
    found = compare_runs([a, b])
    assert leaders(found) == []
    assert found.ranking.verdict == (
        "No best run can be named: a has validation loss 1.4697, and b cannot be told from it "
        "(a lead of 0.0028 is within the noise)."
    )


def test_a_small_lead_is_none_while_the_noise_is_unknown(tmp_path):
    bound = UNKNOWN_NOISE * 2.0
    a = scores(tmp_path / "a", 2.0, precision="fp32")
    b = scores(tmp_path / "b", 2.0 + 0.9 * bound, precision="fp32")
    assert leaders(compare_runs([a, b])) == []
    scores(b, 2.0 + 1.1 * bound, precision="fp32")
    assert leaders(compare_runs([a, b])) == ["a"]
    c = scores(tmp_path / "c", 3.0, precision="fp32")
    scores(b, 2.0 + 0.9 * bound, precision="fp32")
    assert leaders(compare_runs([a, b, c])) == []  # better than the third, but which one is best?


@pytest.fixture
def make_seeds(make_named):
    """`make_seeds(name, losses, **settings)`: finished runs of seeds 0, 1, … with these losses."""

    def make(name, losses, **overrides):
        folders = []
        for seed, loss in enumerate(losses):
            events = [
                {"event": "start", "step": 0, "precision": "fp32"},
                {"event": "eval", "step": 400, "split": "val", "loss": loss},
                {"event": "end", "step": 400, "reason": "completed", "seconds": 1.0},
            ]
            folders.append(make_named(f"{name}-{seed}", events, seed=seed, **overrides))
        return folders

    return make


def test_what_the_seed_alone_moves_names_no_winner(make_seeds):
    """Two runs with losses x and y deviate by |x − y| / √2; with one degree of freedom each, two
    groups have two."""
    low = make_seeds("low", (1.460, 1.470))
    high = make_seeds("high", (1.466, 1.476), optimizer__learning_rate=0.5)
    found = compare_runs([*low, *high])
    assert [run.label for run in found.runs] == ["low-0", "high-0", "low-1", "high-1"]
    assert [group.mean for group in found.ranking.repeats] == pytest.approx([1.465, 1.471])
    deviation = 0.01 / math.sqrt(2)
    assert [group.deviation for group in found.ranking.repeats] == pytest.approx([deviation] * 2)
    assert leaders(found) == []
    bound = STUDENT_T[1] * deviation * math.sqrt(2)
    assert f"anything up to {bound:.4f} may be chance" in found.ranking.noise
    told = "low-0 (2 seeds) has mean validation loss 1.4650 ± 0.0071, and high-0"
    assert told in found.ranking.verdict


def test_a_lead_beyond_the_noise_is_named_for_all_seeds(make_seeds):
    low = make_seeds("low", (1.460, 1.461))
    high = make_seeds("high", (1.480, 1.481), optimizer__learning_rate=0.5)
    found = compare_runs([*high, *low])
    assert leaders(found) == ["low-0", "low-1"]
    assert found.ranking.verdict == (
        "low-0 (2 seeds) has the lowest mean validation loss: 1.4605 ± 0.0007, "
        "0.0200 below high-0 (2 seeds)."
    )


def test_seeds_of_a_sweep_go_by_its_other_values(make_seeds):
    low = make_seeds("learning_rate-1e-3_seed", (1.460, 1.461))
    high = make_seeds("learning_rate-1e-2_seed", (1.480, 1.481), optimizer__learning_rate=0.5)
    assert compare_runs([*high, *low]).ranking.verdict.startswith(
        "learning_rate-1e-3 (2 seeds) has the lowest mean validation loss: 1.4605 ± 0.0007, "
        "0.0200 below learning_rate-1e-2 (2 seeds)."
    )


def test_seeds_of_one_training_are_told_as_such(make_seeds):
    found = compare_runs(make_seeds("a", (1.0, 2.0)))
    assert found.ranking.verdict == (
        "The runs differ in their seed alone: validation loss 1.5000 ± 0.7071 "
        "(mean and standard deviation of 2)."
    )
    assert leaders(found) == []


def began(folder, init_from=None, parent=None, **model):
    """Write the record of what the run in `folder` began with, and return the folder."""
    record = {"init_from": init_from, "parent": parent, "model": model}
    (folder / "plan.json").write_text(json.dumps(record))
    return folder


BASE = {"path": "/m/runs/base/checkpoints/step-00000500", "step": 500, "tokens": 1_234_000}


def test_what_runs_began_with_is_said(make_seeds):
    """A tuned run is not called better than one from random weights without a word of it."""
    tuned, scratch = make_seeds("a", (1.0, 2.0), optimizer__learning_rate=0.5)
    found = compare_runs([began(scratch), began(tuned, BASE)])
    weights = "the weights of base step-00000500 (step 500, 1.23M loss tokens)"
    assert columns(found)["began with"] == (weights, "random weights")
    assert list(columns(found))[:3] == ["best validation loss", "state", "began with"]
    assert found.ranking.repeats == ()  # more than their seed differs
    assert found.ranking.verdict == (
        f"a-0 has the lowest validation loss: 1.0000, 1.0000 below a-1, with one seed each. a-0 "
        f"began with {weights}, a-1 with random weights: the difference is not that of their "
        "training alone."
    )
    assert f"began with {weights}" in text_of(render_page(read_run(tuned)))
    assert "began with" not in text_of(render_page(read_run(scratch)))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"init_from": {"path": "/m/SmolLM2"}}, "the weights of SmolLM2"),
        ({"init_from": {"path": "/m/base", "base_model": "org/Smol"}},
         "the weights of base, from Smol"),
        ({"parent": {"run_id": "0123456789ab", "step": 50}}, "step 50 of run 01234567"),
        ({"parent": {"run_id": 7, "step": "x"}}, "step x of run 7"),  # damaged
        ({"parent": {"step": 50}}, "step 50 of run None"),
        ({"built_by": "models.mine"}, ""),
    ],
)  # fmt: skip
def test_what_a_run_began_with(tmp_path, record, words):
    assert results(read_run(began(scores(tmp_path / "a", 2.0), **record))).began == words


def test_runs_that_began_alike_are_not_said_to_differ(make_seeds):
    found = compare_runs([began(run, BASE) for run in make_seeds("a", (1.0, 2.0))])
    assert found.ranking.verdict.startswith("The runs differ in their seed alone")
    assert next(title for title, _ in found.alike) == "began with"


def test_two_evaluations_are_drawn_from_one_to_the_other(tmp_path):
    """The first, before any step, is far above the second: cut off there, a stroke is left."""
    runs = []
    for name, loss in (("a", 2.0), ("b", 2.1)):
        events = [{"event": "eval", "step": s, "split": "val", "loss": v, "bits_per_byte": v / 2}
                  for s, v in ((0, 4.5), (60, loss))]  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)))
        runs.append((name, read_run(tmp_path / name)))
    low, high = overlay_figure("Validation loss", runs * 4).axes[0].get_ylim()
    assert low < 2.0
    assert high > 4.5
    assert not hides_start(runs)
    lines = overlay_figure("Validation loss", runs * 4).axes[0].get_lines()
    assert {line.get_marker() for line in lines} == {"o"}  # dashed ones, too


def test_other_tokens_are_drawn_in_bits_per_byte(make_named, run_events, run_end):
    """A run that was never evaluated has no such axis, and nats are one click away."""
    events = [*run_events(400), run_end]
    half = [
        {**event, "bits_per_byte": event["loss"] / math.log(2) / 4} if "split" in event else event
        for event in events
    ]
    never = [event for event in events if event["event"] != "eval"]
    runs = [make_named("a", events), make_named("b", half, model__vocab_size=20),
            make_named("c", never, model__vocab_size=30)]  # fmt: skip
    found = compare_runs(runs)
    assert not found.ranking.nats_compare
    pair = [(run.label, run.record) for run in found.runs]
    for loss in LOSSES:
        axes = overlay_figure(loss, pair, unit=BITS).axes[0]
        assert axes.get_ylabel() == "bits per byte"
        ends = {line.get_label(): line.get_ydata()[-1] for line in axes.get_lines()}
        assert ends.keys() == {"a", "b"}
        assert ends["b"] == pytest.approx(ends["a"] / 4)
    page = render_comparison(found)
    assert page.index("bits per byte</text") < page.index("nats per token</text")
    same = compare_runs([*runs[:1], make_named("d", events, log__interval=3)])
    assert "bits per byte</text" not in render_comparison(same)


def test_tokens_seen_and_loss_tokens_have_a_column_each(make_named, run_events, run_end):
    """An earlier version wrote the loss tokens as `tokens`, and its speed counted them."""
    whole = [*run_events(400), run_end]
    masked = [
        {**event, "loss_tokens": event["tokens"] // 4} if event["event"] == "train" else event
        for event in whole
    ]
    quarter = {"tokens_per_second": 640.0}
    earlier = [
        {**event, "tokens": event["tokens"] // 4, **quarter} if event["event"] == "train" else event
        for event in whole
    ]
    runs = [make_named(n, each) for n, each in (("a", whole), ("b", masked), ("c", earlier))]
    found = compare_runs(runs)
    assert columns(found)["loss tokens"] == ("102k", "25.6k", "25.6k")
    assert ("tokens seen", "102k") in found.alike
    assert columns(found)["tokens per second"] == ("2.56k",) * 3
    assert [run.record.train["elapsed_seconds"].values[-1] for run in found.runs] == (
        pytest.approx([40, 40, 40])
    )
    facts = " ".join(text_of(render_page(read_run(runs[1]))).split())
    assert "Tokens seen 102k 256 per step Loss tokens 25.6k 25.0 % of those seen" in facts
    assert "Loss tokens" not in text_of(render_page(read_run(runs[0])))
    assert "loss tokens" not in columns(compare_runs([runs[0], make_named("d", whole)]))


def test_a_run_that_was_stopped_is_no_repeat(make_seeds):
    first, second = make_seeds("a", (1.0, 2.0))
    path = second / "metrics.jsonl"
    path.write_text(path.read_text().replace("completed", "SIGTERM"))
    assert compare_runs([first, second]).ranking.repeats == ()


def test_each_layout_of_a_run_is_said(tmp_path):
    a = scores(tmp_path / "a", 2.0, layouts=("data=2,zero=3", "data=2,zero=3", "data=1"))
    b = scores(tmp_path / "b", 2.5, layouts=("data=1",))
    assert columns(compare_runs([a, b]))["layout"] == ("data=2,zero=3 → data=1", "data=1")


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
    assert "different text (data.grammar.seed)" in compare_runs(runs).ranking.verdict
    better = [
        {**event, "bits_per_byte": 0.1} if event["event"] == "eval" else event for event in events
    ]
    runs = [runs[0], make_named("c", better, model__vocab_size=20)]
    assert compare_runs(runs).ranking.verdict.startswith(
        "c has the lowest bits per byte, which compare"
    )


def test_a_streamed_run_holds_out_other_text(make_named, run_events, run_end):
    def read(run, data):
        (run / "plan.json").write_text(json.dumps({"data": {"hash": data}}))
        return run

    events = [*run_events(400), run_end]
    streamed = {"data__order": "streamed", "data__tokenizer": "bpe:300"}
    whole = read(make_named("a", events, data__tokenizer="bpe:300"), "1")
    other = read(make_named("b", events, **streamed), "2")
    assert "different text (data.order)" in compare_runs([whole, other]).ranking.verdict
    prepared = read(other, "1")  # shards: in any order the same are held out
    assert compare_runs([whole, prepared]).ranking.is_ranked


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
def test_each_of_twenty_runs_has_its_line_and_further_ones_are_pale(pair, loss):
    runs = [(run.label, run.record) for run in compare_runs(pair).runs][:1] * 22
    axes = overlay_figure(loss, runs).axes[0]
    lines = axes.get_lines()
    styles = [(line.get_color(), line._unscaled_dash_pattern) for line in lines]
    assert len({str(style) for style in styles[:20]}) == len(RUN_STYLES) == 20
    assert {line.get_color() for line in lines[20:]} == {PAGE.muted}
    assert axes.get_legend() is None  # it stands beside the curves, on the page


def lightness(red, green, blue):
    """CIE L*a*b* of linear sRGB values."""
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


SIGHTS = {
    "all three cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red ones": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no green ones": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no blue ones": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
"""Kinds of colour vision, as matrices on linear sRGB (Machado, Oliveira and Fernandes 2009)."""


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_the_colours_of_runs_differ_for_every_kind_of_colour_vision(sight, theme):
    style = (markup.TEMPLATES / "page.css").read_text()
    colours = []
    for number in range(1, 6):
        code = re.findall(rf"--run-{number}: #(\w{{6}})", style)[theme]
        srgb = [int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in srgb]
        seen = [sum(a * b for a, b in zip(row, linear, strict=True)) for row in SIGHTS[sight]]
        colours.append(lightness(*(min(max(value, 0), 1) for value in seen)))
    nearest = min(math.dist(a, b) for a, b in itertools.combinations(colours, 2))
    assert nearest > 15  # 2.3 is just noticed; swatches side by side need several times that


def test_the_page_stands_alone(pair):
    page = check_page(render_comparison(compare_runs(pair)))
    text = text_of(page)
    for part in ("2 runs compared", "by tokens", "by time", "stopped", "Stopped by SIGTERM",
                 "learning_ rate", "0.5", "best validation loss", "★ best",
                 "The same in all: tokens seen 102k, parameters 10,745,088"):  # fmt: skip
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
    assert "are equal in validation loss" in found.ranking.verdict


def test_runs_of_which_little_is_known(pair, tmp_path):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text('{"event": "start", "step": 0}\n')
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.toml").write_text("name = [")
    found = compare_runs([*pair, tmp_path / "begun", tmp_path / "damaged"])
    assert columns(found)["state"][2:] == ("not started", "not started")
    assert found.differing.keys() == {"optimizer.learning_rate", "log.interval"}
    assert "</html>" in render_comparison(found)
    nothing = compare_runs([tmp_path / "begun", tmp_path / "damaged"])
    assert "No step has been logged yet" in render_comparison(nothing)


def test_the_command_prints_a_table_and_writes_the_page(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", str(pair[0]), str(pair[1])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["#", "run", "best", "validation"]
    assert re.fullmatch(r"1  a \* +[\d.]+  finished .*", lines[1])
    assert re.fullmatch(r"2  b   +[\d.]+  stopped .*", lines[2])
    assert any("optimizer.learning_rate" in line for line in lines)
    assert lines[-1] == "compare.html"
    assert "2 runs compared" in (tmp_path / "compare.html").read_text(encoding="utf-8")


def test_columns_stand_in_groups_as_wide_as_the_terminal(pair, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert compare.run([*map(str, pair), "--out", str(pair[0] / "c.html")]) == 0
    lines = capsys.readouterr().out.split("\n* best")[0].splitlines()
    assert max(map(len, lines)) <= 60
    heads = [line for line in lines if line.startswith("#  run")]
    assert len(heads) > 2
    found = compare_runs(pair)
    for column in found.columns:
        assert sum(column.title in head for head in heads) >= 1, column.title


def test_json_is_strict(pair, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert compare.run([*map(str, pair), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["page"] == str(out)
    assert [run["label"] for run in found["runs"]] == ["a", "b"]
    assert [run["leads"] for run in found["runs"]] == [True, False]
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


def test_an_earlier_versions_run_has_the_defaults_of_keys_that_it_lacks(
    make_named, run_events, run_end
):
    new, old = (make_named(name, [*run_events(400), run_end]) for name in ("new", "old"))
    config = (old / "config.toml").read_text().replace("seed = 1337", "seed = 1")
    lacks = ("sources = []", "evaluations = []", "targets = []", "betas = [0.9, 0.99]")
    for line in lacks:
        assert line in config
        config = config.replace(line, "")
    (old / "config.toml").write_text(config)
    found = compare_runs([new, old])
    assert list(found.differing) == ["seed"]
    assert len(found.ranking.repeats) == 1


def test_folders_with_odd_names_are_compared_and_named_on_hover(make_run, tmp_path):
    names = (b"a\xff", b"_b", b"c")
    folders = [tmp_path / os.fsdecode(name) for name in names]
    for folder in folders:
        shutil.move(make_run(config=None), folder)
    page = markup.write_page(tmp_path / "page.html", render_comparison(compare_runs(folders)))
    curves = re.findall(r'data-hover="(.*?)"', page.read_text(encoding="utf-8"))
    shown = {curve["name"] for each in curves for curve in json.loads(unescape(each))["curves"]}
    assert shown == {"a\N{REPLACEMENT CHARACTER}", "_b", "c"}


@pytest.mark.parametrize(
    ("line", "value"),
    [("seed = 1337", "seed = [1]"), ("clip_norm = 1.0", "clip_norm = inf"),
     ("betas = [0.9, 0.99]", "betas = [nan, 0.9]")],
)  # fmt: skip
def test_settings_that_no_run_can_have_spoil_no_page(
    make_named, run_events, run_end, capsys, tmp_path, line, value
):
    a, b = (make_named(name, [*run_events(400), run_end]) for name in "ab")
    config = (b / "config.toml").read_text()
    assert line in config
    (b / "config.toml").write_text(config.replace(line, value))
    assert main(["compare", str(a), str(b), "--json", "--out", str(tmp_path / "c.html")]) == 0
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert main(["report", str(b)]) == 0
