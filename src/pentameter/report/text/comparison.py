"""Several runs compared, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size

from pentameter.report.watch.comparison import Comparison

LONGEST_CELL = 32


def comparison_lines(comparison: Comparison, width: int) -> Iterator[str]:
    """Yield the table's lines, a row per run, at most `width` characters wide; columns that do not
    fit follow in further tables below. After the tables come the results that are the same for all
    runs, a line each, and the verdict on which run is best.

    Names and settings are read from files, and may hold what a terminal would act on."""
    runs, leaders = comparison.runs, comparison.ranking.leaders
    ranks = [f"{i}" if comparison.ranking.is_ranked else "" for i in range(1, len(runs) + 1)]
    names = [f"{run.label} *" if run.label in leaders else run.label for run in runs]
    beside = [_padded("#", ranks, is_number=True), _padded("run", names, is_number=False)]
    others = [
        _padded(column.title, column.cells, is_number=column.is_number)
        for column in comparison.columns
    ]
    widths = [cell_len(column[0]) for column in others]
    room = width - sum(cell_len(column[0]) + 2 for column in beside) + 2
    for number, group in enumerate(_groups(widths, room)):
        if number:
            yield ""
        for cells in zip(*beside, *(others[i] for i in group), strict=True):
            yield "  ".join(cells).rstrip()
    yield ""
    if leaders:
        yield "* best"
    for title, cell in comparison.alike:
        yield f"{title}: {cell}"
    yield from filter(None, (comparison.ranking.verdict, comparison.ranking.noise))


def _padded(title: str, cells: Sequence[str], *, is_number: bool) -> list[str]:
    """Return a column's texts, its title first, all as wide as the widest; numbers are aligned
    right."""
    texts = [
        text
        if cell_len(text) <= LONGEST_CELL
        else f"{set_cell_size(text, LONGEST_CELL - 1).rstrip()}…"
        for text in (title, *cells)
    ]
    widest = max(map(cell_len, texts))
    if is_number:
        return [" " * (widest - cell_len(text)) + text for text in texts]
    return [set_cell_size(text, widest) for text in texts]


def _groups(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yield lists of column indices, in order, that fit in `room` characters; a column that is too
    wide has a list to itself."""
    group: list[int] = []
    for index, width in enumerate(widths):
        if group and sum(widths[i] + 2 for i in group) + width + 2 > room:
            yield group
            group = []
        group.append(index)
    yield group
