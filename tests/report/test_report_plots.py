import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import matplotlib as mpl
import pytest

from pentameter.errors import ConfigError, StorageError
from pentameter.record.reading import read_run
from pentameter.report.figures.plots import (
    NARROW_INCHES,
    PAGE,
    loss_figure,
    page_svg,
    save_figure,
    small_figures,
)


def legend(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_the_loss_figure_names_its_curves(make_run, run_events):
    events = run_events(400, entropy_rate=0.9)
    events.append({"event": "resume", "step": 200})
    events.append({"event": "resume", "step": 300, "layout": "data=7"})
    record = read_run(make_run(events))
    best = record.best()
    assert legend(loss_figure(record)) == [
        "train, smoothed",
        "validation",
        f"best {best.loss:.4f} at step {best.step}",
        "entropy rate 0.9000",
        "resumed",
        "resumed in another layout",
    ]


def fall(highest):
    """A loss that falls from `highest` to 2 in 20 of 400 steps, and then to 1."""
    losses = [highest - (highest - 2) * step / 20 for step in range(20)]
    losses += [2 - step / 380 for step in range(381)]
    lines = [f'{{"event": "train", "step": {i}, "loss": {v}}}' for i, v in enumerate(losses)]
    return "\n".join(lines)


def test_the_axis_may_begin_after_the_fall_at_the_start(make_run):
    record = read_run(make_run(fall(4.6)))
    whole, settled = loss_figure(record).axes[0], loss_figure(record, settled=True).axes[0]
    assert whole.get_ylim()[1] > 4.6
    assert 1.9 < settled.get_ylim()[1] < 2.1
    assert settled.get_ylim()[0] < 1
    assert settled.get_title(loc="left") == "↑ begins at 4.60, above this axis"
    assert whole.get_title(loc="left") == ""


def test_a_loss_without_such_a_fall_has_one_axis(make_run):
    assert loss_figure(read_run(make_run(fall(2.1))), settled=True) is None


def test_a_loss_that_rises_again_is_seen_whole(make_run):
    rising = "\n".join(
        f'{{"event": "train", "step": {i}, "loss": {4 - 3 * i / 200 if i < 200 else i / 100 - 1}}}'
        for i in range(401)
    )
    assert loss_figure(read_run(make_run(rising)), settled=True) is None


def test_no_loss_no_figure(tmp_path, make_run):
    assert loss_figure(read_run(tmp_path)) is None
    folder = make_run('{"event": "train", "step": 1, "loss": NaN}')
    assert loss_figure(read_run(folder)) is None


def test_one_step_is_enough(make_run):
    record = read_run(make_run('{"event": "train", "step": 1, "loss": 4.1, "grad_norm": 0}'))
    assert legend(loss_figure(record)) == ["train"]
    for _, _, figure in small_figures(record, PAGE):
        page_svg(figure, "x", "")


def test_an_exploding_loss_is_drawn_on_a_logarithmic_axis(make_run):
    lines = [f'{{"event": "train", "step": {i}, "loss": {10.0 ** min(i, 30)}}}' for i in range(40)]
    figure = loss_figure(read_run(make_run("\n".join(lines))))
    assert figure.axes[0].get_yscale() == "log"


def test_the_page_svg_is_xml_without_foreign_parts(make_run):
    record = read_run(make_run())
    svg = page_svg(
        loss_figure(record, palette=PAGE, size_inches=NARROW_INCHES), "loss-narrow", "Loss"
    )
    assert svg.startswith("<svg viewBox=")
    # inside HTML the parser knows the namespaces; an XML parser must be told
    ET.fromstring(svg.replace("<svg", '<svg xmlns:xlink="x"', 1))
    assert "http" not in svg
    assert "<style" not in svg
    ids = re.findall(r'id="([^"]*)"', svg)
    assert len(ids) == len(set(ids))
    assert all(name.startswith("loss-narrow-") for name in ids)
    used = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', svg)
    assert {a or b for a, b in used} <= set(ids)
    assert set(re.findall(r"#[0-9a-f]{6}", svg)) == set()  # every colour is the style sheet's
    assert {"var(--train)", "var(--validation)"} <= set(re.findall(r"var\(--\w+\)", svg))


def test_the_same_run_gives_the_same_drawing(make_run):
    record = read_run(make_run())
    first, second = (page_svg(loss_figure(record, palette=PAGE), "a", "b") for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_saving(make_run, tmp_path, suffix, magic):
    before = dict(mpl.rcParams)
    path = save_figure(loss_figure(read_run(make_run())), tmp_path / f"loss.{suffix}")
    assert path.read_bytes().startswith(magic)
    assert dict(mpl.rcParams) == before


def test_saving_where_it_cannot_be(make_run, tmp_path):
    figure = loss_figure(read_run(make_run()))
    with pytest.raises(ConfigError, match="svg, png, pdf"):
        save_figure(figure, tmp_path / "loss.doc")
    with pytest.raises(StorageError, match="nowhere"):
        save_figure(figure, tmp_path / "nowhere" / "loss.png")


def test_mfu_is_a_curve_of_its_own_where_it_does_not_follow_the_speed(make_run, run_events):
    events = run_events(400)
    record = read_run(make_run(events))
    keys = [key for key, _, _ in small_figures(record, PAGE)]
    assert keys == ["learning_rate", "grad_norm", "tokens_per_second"]
    values = [0.4 if step < 200 else 0.1 for step in record.train["mfu"].steps]
    moved = replace(record.train["mfu"], values=tuple(values))  # on a device of another peak
    record = replace(record, train=record.train | {"mfu": moved})
    keys = [key for key, _, _ in small_figures(record, PAGE)]
    assert keys == ["learning_rate", "grad_norm", "tokens_per_second", "mfu"]


def test_the_axis_of_mfu_is_that_of_the_speed(make_run):
    figure = {key: figure for key, _, figure in small_figures(read_run(make_run()), PAGE)}
    axes = figure["tokens_per_second"].axes[0]
    (right,) = axes.child_axes
    figure["tokens_per_second"].draw_without_rendering()
    assert right.get_ylim()[1] == pytest.approx(axes.get_ylim()[1] * 0.4 / 2560)
