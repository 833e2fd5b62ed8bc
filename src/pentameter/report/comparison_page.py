"""A comparison as one HTML page that asks nothing of the network."""

from __future__ import annotations

from collections.abc import Iterable

from pentameter.config.fingerprint import NOT_THE_TRAINING
from pentameter.report import wording
from pentameter.report.comparison import Comparison
from pentameter.report.markup import document, dotted, section, tabs, text
from pentameter.report.outcome import outcome
from pentameter.report.overlay import AXES, LOSSES, is_cut, overlay_figure, useful_axes
from pentameter.report.plots import RUN_COLOURS, page_svg


def render_comparison(comparison: Comparison) -> str:
    """The whole page as HTML."""
    labels = [run.label for run in comparison.runs]
    return document(
        f"{', '.join(labels)} – pentameter compare",
        (
            _header(comparison),
            _losses(comparison),
            section("Results", _table(comparison, "", _result_rows(comparison))),
            _settings(comparison),
        ),
        ", ".join(str(run.record.folder) for run in comparison.runs),
    )


def _header(comparison: Comparison) -> str:
    runs = "".join(
        f'<li>{_key(index)}<b>{text(run.label)}</b> <span class="badge {ended.kind}">'
        f"{text(ended.label)}</span> <span>{text(ended.sentence)}</span></li>"
        for index, run in enumerate(comparison.runs)
        if (ended := outcome(run.record))
    )
    verdict = f'<p class="outcome">{text(comparison.verdict)}</p>' if comparison.verdict else ""
    return (
        f"<header><h1>{len(comparison.runs)} runs compared</h1>{verdict}"
        f'<ul class="runs">{runs}</ul></header>'
    )


def _losses(comparison: Comparison) -> str:
    runs = [(run.label, run.record) for run in comparison.runs]
    asked = [(f"by {AXES[axis].split()[0]}", axis, True) for axis in useful_axes(runs)]
    if is_cut(runs):
        asked.append(("whole run", "step", False))
    words = {"by seconds": "by time"}
    views = []
    for label, axis, settled in asked:
        figures = []
        for loss in LOSSES:
            figure = overlay_figure(loss, runs, axis=axis, settled=settled)
            if figure is None:
                continue
            name = "-".join((loss.split()[0], axis.replace("_", "-"), str(settled))).lower()
            svg = page_svg(figure, name, f"{loss} of {len(runs)} runs over {AXES[axis]}")
            figures.append(f'<figure class="card plot"><h3>{text(loss)}</h3>{svg}</figure>')
        if figures:
            views.append((words.get(label, label), f'<div class="pair">{"".join(figures)}</div>'))
    if not views:
        return section("Loss", '<div class="card muted">No step has been logged yet.</div>')
    return section("Loss", tabs("axis", views))


def _result_rows(comparison: Comparison) -> Iterable[str]:
    for row in comparison.rows:
        cells = "".join(
            f"<td{' class=best' if index in row.best else ''}>{text(cell)}</td>"
            for index, cell in enumerate(row.cells)
        )
        yield f'<tr><th scope="row">{text(row.title)}</th>{cells}</tr>'


def _settings(comparison: Comparison) -> str:
    if not comparison.differing:
        body = '<div class="card muted">The runs have the same settings.</div>'
        return section("Settings that differ", body)
    rows = []
    for path, values in comparison.differing.items():
        cells = "".join(f"<td>{text(wording.scalar(value))}</td>" for value in values)
        aside = " class=muted" if path in NOT_THE_TRAINING else ""
        rows.append(f'<tr{aside}><th scope="row">{dotted(path)}</th>{cells}</tr>')
    note = ""
    if comparison.differing.keys() & NOT_THE_TRAINING.keys():
        note = '<p class="note">Pale: changes no weight of a step.</p>'
    return section("Settings that differ", _table(comparison, "setting", rows) + note)


def _table(comparison: Comparison, corner: str, rows: Iterable[str]) -> str:
    """A table with a column for each run."""
    heads = "".join(
        f'<th scope="col">{_key(index)}{text(run.label)}</th>'
        for index, run in enumerate(comparison.runs)
    )
    return (
        '<div class="card scroll"><table class="rows settings"><thead><tr>'
        f'<th scope="col">{text(corner)}</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _key(index: int) -> str:
    return f'<i class="key run-{index % len(RUN_COLOURS) + 1}"></i>'
