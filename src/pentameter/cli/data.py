"""`pentameter data`: show the batch that a run's step reads, without a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pentameter.cli.options.arguments import parse
from pentameter.errors import ConfigError, printable

if TYPE_CHECKING:
    from pentameter.data.batches.rows_read import RowRead, Stretch
    from pentameter.data.batches.step import Batch
    from pentameter.record.run_data import RunData

SHOWN_ROWS = 4
"""Number of rows printed without --rows."""

SHOWN_SPANS = 8
"""Most document spans in a packed row that are listed above its text."""

TERMINAL_LEGEND = "dim: read, but no target that counts in the loss · ‹bold›: a special token"
LEGEND = "⟦…⟧ read, but no target that counts in the loss · ‹…› a special token"


@dataclass(frozen=True)
class DataArguments:
    """Print what a step of a run reads: sources, documents, tokens and text, without a model.

    Step N is the one that metrics.jsonl, the log and the report call N, the N-th optimizer step; it
    reads the batch with index N - 1, the same on every layout and after any resume.
    """

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """The run's folder, runs/NAME. Its tokens must still be there; nothing is prepared anew."""
    step: Annotated[int, tyro.conf.arg(metavar="N")]
    """The step, from 1."""
    rows: Annotated[str | None, tyro.conf.arg(metavar="FIRST:END")] = None
    """Rows of the batch, counted from 0, END not included: 0:16; a number is one row, `:` is all.
    The first four when absent, with --json all."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object, with every token's id and whether it counts."""


def run(arguments: list[str]) -> int:
    """Print the batch rows that a step reads, as `arguments` (the command line after the verb) ask,
    and return the exit code 0."""
    asked = parse(DataArguments, arguments, verb="data")
    import numpy as np

    from pentameter.data.batches.rows_read import rows_read
    from pentameter.record.run_data import open_run_data

    data = open_run_data(asked.run_dir)
    index = data.batch_index(asked.step)
    batch = data.batches.batch(index)
    chosen = _chosen_rows(asked, len(batch.rows))
    numbers = np.arange(chosen.start, chosen.stop, dtype=np.int64)
    rows = rows_read(data.batches, data.dataset.tokenizer, index, numbers)
    if asked.json:
        print(json.dumps(_record(asked.step, data, batch, rows)))
    else:
        _print(asked, data, batch, rows)
    return 0


def _chosen_rows(asked: DataArguments, n_rows: int) -> range:
    """Return the batch row numbers to print, from --rows or the first ones; `n_rows` is the batch
    size. Raises ConfigError for rows outside the batch."""
    if asked.rows is None:
        return range(n_rows if asked.json else min(SHOWN_ROWS, n_rows))
    form = re.fullmatch(r"([0-9]{0,9})(:?)([0-9]{0,9})", asked.rows)
    if form is not None and (form[1] or form[2]):
        first = int(form[1] or 0)
        end = int(form[3] or n_rows) if form[2] else first + 1
        if first < end <= n_rows:
            return range(first, end)
    raise ConfigError(
        f"--rows {asked.rows} must be FIRST:END, or a number, within the batch's rows 0:{n_rows}; "
        "e.g. --rows 0:4"
    )


def _record(step: int, data: RunData, batch: Batch, rows: list[RowRead]) -> dict[str, Any]:
    return {
        "name": data.config.name,
        "step": step,
        "batch_index": step - 1,
        "batch_sha256": batch.hash(),
        "batch_rows": len(batch.rows),
        "context_length": data.config.model.context_length,
        "n_targets": batch.n_targets,
        "sources": data.source_names,
        "rows": [each.to_json() for each in rows],
    }


def _print(asked: DataArguments, data: RunData, batch: Batch, rows: list[RowRead]) -> None:
    """Print batch rows as text; tokens that do not count in the loss are dim on a terminal, else
    inside ⟦ ⟧."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, soft_wrap=True)
    n_rows, index = len(batch.rows), asked.step - 1
    per_epoch = data.batches.rows_per_epoch
    epoch = "" if per_epoch is None else f" · epoch {index * n_rows // per_epoch:,}"
    console.print(
        f"{data.config.name}, step {asked.step:,}: batch {index:,} (counted from 0), {n_rows:,} "
        f"rows × {data.config.model.context_length:,} tokens · {batch.n_targets:,} targets count"
        f"{epoch} · sha256 {batch.hash()[:16]}"
    )
    console.print(LEGEND if not console.is_terminal else TERMINAL_LEGEND)
    for row in rows:
        console.print("")
        console.print(_heading(row, data), style="bold")
        text = Text()
        for words, style in _styled(row.stretches, plain=not console.is_terminal):
            text.append(printable(words, keep="\n\t"), style)
        for line in text.split("\n", allow_blank=True):
            console.print(Text("  │ ").append_text(line))
    if (n_left_out := n_rows - len(rows)) > 0:
        console.print(f"\n{n_left_out:,} of {n_rows:,} rows are not shown: --rows :, or --json")


def _heading(row: RowRead, data: RunData) -> str:
    """Return the lines above a row's text: its number, source and targets, and a line per document
    span."""
    source = printable(data.source_names[row.source])
    n_targets = len(row.tokens) - 1 + row.n_padded
    padded = f" · {row.n_padded:,} padded" if row.n_padded else ""
    lines = [
        f"row {row.row:,} · {source} · {row.n_targets:,} of {n_targets:,} targets count{padded}"
    ]
    for span in row.spans[:SHOWN_SPANS]:
        documents = f"document {span.first_document:,}"
        if span.last_document > span.first_document:
            documents = f"documents {span.first_document:,} to {span.last_document:,}"
        begins = f", from its token {span.offset:,}" if span.offset else ""
        lines.append(f"  train {span.start:,} to {span.stop - 1:,} · {documents}{begins}")
    if (n_left_out := len(row.spans) - SHOWN_SPANS) > 0:
        lines.append(f"  and {n_left_out:,} more documents (--json lists them)")
    return "\n".join(lines)


def _styled(stretches: tuple[Stretch, ...], *, plain: bool) -> Iterator[tuple[str, str]]:
    """Yield (text, rich style) for each stretch (consecutive tokens in a row that all count in the
    loss, or all do not). With `plain`, styles are empty, and ⟦ ⟧ enclose tokens that do not."""
    is_open = False
    for each in stretches:
        text = f"‹{each.text}›" if each.is_special else each.text
        if plain and each.counts == is_open:
            is_open = not each.counts
            yield "⟦" if is_open else "⟧", ""
        style = ("bold " if each.is_special else "") + ("" if each.counts else "dim")
        yield text, "" if plain else style.strip()
    if is_open:
        yield "⟧", ""
