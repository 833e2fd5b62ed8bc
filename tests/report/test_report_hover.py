import json
import re
from html import unescape

import numpy as np

from pentameter.record.reading import read_run
from pentameter.report.figures.plots import PAGE, loss_figure, page_svg, small_figures


def hover_of(svg):
    return json.loads(unescape(re.search(r'data-hover="([^"]*)"', svg)[1]))


def test_the_pointer_is_told_the_curves_that_are_drawn(make_run):
    figure = loss_figure(read_run(make_run()), palette=PAGE)
    svg = page_svg(figure, "loss", "")
    hover = hover_of(svg)
    assert hover["unit"] == "step"
    assert [curve["name"] for curve in hover["curves"]] == ["train, smoothed", "validation"]
    assert [curve["colour"] for curve in hover["curves"]] == ["var(--train)", "var(--validation)"]
    train, validation = hover["curves"]
    assert validation["x"] == [100, 200, 300, 400]
    drawn = figure.axes[0].get_lines()[1].get_ydata()
    np.testing.assert_allclose(train["y"], drawn, rtol=5e-5)  # five digits are told


def test_the_corners_are_those_of_the_drawing(make_run):
    """A point's place computed from the corners and limits is where matplotlib drew it."""
    figure = loss_figure(read_run(make_run()), palette=PAGE)
    hover = hover_of(page_svg(figure, "loss", ""))
    axes = figure.axes[0]
    left, top, right, bottom = hover["box"]
    (x0, x1), (y0, y1) = hover["x"], hover["y"]
    height = 72 * figure.get_size_inches()[1]
    for x, y in ((100, 1.5), (400, 3)):
        ours = (
            left + (x - x0) / (x1 - x0) * (right - left),
            bottom - (y - y0) / (y1 - y0) * (bottom - top),
        )
        pixels = axes.transData.transform((x, y)) * 72 / figure.dpi
        np.testing.assert_allclose(ours, (pixels[0], height - pixels[1]), atol=1e-6)


def test_an_unlabelled_curve_has_no_name_and_marks_are_no_curves(make_run):
    record = read_run(make_run())
    for _, _, figure in small_figures(record, PAGE):
        hover = hover_of(page_svg(figure, "x", ""))
        assert [curve["name"] for curve in hover["curves"]] == [""]


def test_one_point_is_no_curve(make_run):
    record = read_run(make_run('{"event": "train", "step": 1, "loss": 4.1}'))
    assert "data-hover" not in page_svg(loss_figure(record, palette=PAGE), "x", "")
