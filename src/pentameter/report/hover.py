"""Values under the pointer: the curves of a figure as data, and the script of a page that reads it.

Without JavaScript a page is the same page, without values.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

THINNEST_POINTS = 1.5
"""Lines thinner than this, in points, are noise behind a curve, grid or marks."""


def hover_attribute(figure: Figure) -> str:
    """`data-hover` with the curves of a figure that was drawn, as an attribute of its SVG element.

    It holds the plot's corners in the SVG's units, the limits of both axes, and of each curve its
    label, colour and points. "" where there is none.
    """
    axes = figure.axes[0]
    curves = [line for line in axes.get_lines() if _is_curve(line)]
    if not curves:
        return ""
    width, height = 72 * figure.get_size_inches()
    box = axes.get_position()
    values = {
        "box": [box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height],
        "x": axes.get_xlim(),
        "y": axes.get_ylim(),
        "log": axes.get_yscale() == "log",
        "unit": axes.get_xlabel(),
        "curves": [
            {
                "name": "" if str(line.get_label()).startswith("_") else line.get_label(),
                "colour": line.get_color(),
                "x": line.get_xdata(),
                "y": line.get_ydata(),
            }
            for line in curves
        ],
    }
    text = json.dumps(values, default=_short, ensure_ascii=False, separators=(",", ":"))
    return f' data-hover="{escape(text)}"'


def _is_curve(line: Line2D) -> bool:
    return line.get_linewidth() >= THINNEST_POINTS and np.size(line.get_xdata()) > 1


def _short(array: object) -> list[float | int]:
    """Numbers with five digits: more cannot be seen, and a page has tens of thousands."""
    numbers = [float(f"{value:.5g}") for value in np.asarray(array, dtype=float)]
    return [int(number) if number.is_integer() else number for number in numbers]


SCRIPT = """
for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const plot = JSON.parse(svg.dataset.hover), [left, top, right, bottom] = plot.box;
  const make = (name, values) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in values) made.setAttribute(key, values[key]);
    return made;
  };
  const scale = plot.log ? Math.log : (value) => value;
  const [low, high] = plot.y.map(scale);
  const toX = (x) => left + (x - plot.x[0]) / (plot.x[1] - plot.x[0]) * (right - left);
  const toY = (y) => bottom - (scale(y) - low) / (high - low) * (bottom - top);
  const said = (value) => value.toLocaleString("en", {maximumSignificantDigits: 5});
  const nearest = (curve, x) => {
    let best = 0;
    curve.x.forEach((at, i) => { if (Math.abs(at - x) < Math.abs(curve.x[best] - x)) best = i; });
    return best;
  };
  const marks = make("g", {visibility: "hidden", "pointer-events": "none"});
  const line = make("line", {y1: top, y2: bottom, stroke: "var(--muted)", "stroke-width": .8});
  marks.append(line);
  for (const curve of plot.curves) {
    curve.dot = make("circle", {r: 3.2, fill: curve.colour});
    marks.append(curve.dot);
  }
  svg.append(marks);
  const box = document.createElement("div");
  box.className = "hover";
  box.hidden = true;
  svg.parentNode.append(box);
  const hide = () => { box.hidden = true; marks.setAttribute("visibility", "hidden"); };
  const densest = plot.curves.reduce((a, b) => a.x.length >= b.x.length ? a : b);
  const show = (event) => {
    const frame = svg.getBoundingClientRect();
    const unit = frame.width / svg.viewBox.baseVal.width;
    const at = (event.clientX - frame.left) / unit;
    if (at < left - 8 || at > right + 8) return hide();
    const asked = plot.x[0] + (at - left) / (right - left) * (plot.x[1] - plot.x[0]);
    const x = densest.x[nearest(densest, asked)];
    line.setAttribute("x1", toX(x));
    line.setAttribute("x2", toX(x));
    box.replaceChildren(`${plot.unit} ${said(x)}`);
    for (const curve of plot.curves) {
      const i = nearest(curve, x), y = toY(curve.y[i]);
      curve.dot.setAttribute("cx", toX(curve.x[i]));
      curve.dot.setAttribute("cy", y);
      curve.dot.setAttribute("visibility", y < top - 1 || y > bottom + 1 ? "hidden" : "inherit");
      const row = document.createElement("div"), key = document.createElement("i");
      key.style.background = curve.colour;
      const where = curve.x[i] === x ? "" : ` at ${said(curve.x[i])}`;
      row.append(key, `${curve.name} ${said(curve.y[i])}${where}`);
      box.append(row);
    }
    marks.setAttribute("visibility", "visible");
    box.hidden = false;
    const room = svg.parentNode.clientWidth - box.offsetWidth;
    const inset = frame.left - svg.parentNode.getBoundingClientRect().left;
    const beside = toX(x) * unit + inset + 14;
    box.style.left = `${Math.max(0, Math.min(beside, room))}px`;
    if (beside > room) box.style.left = `${Math.max(0, beside - 28 - box.offsetWidth)}px`;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
"""

SCRIPT_HASH = "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
"""Hash of the script: a page's policy lets the browser run this one and no other."""
