"""`pentameter data`: show the batch that a run's step reads, without a model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pentameter.cli.options.arguments import parse
from pentameter.errors import ConfigError

SHOWN_ROWS = 4
"""Number of rows printed without --rows."""


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
    from rich.console import Console

    from pentameter.data.batches.rows_read import rows_read
    from pentameter.record.run_data import open_run_data
    from pentameter.report.text.batch_rows import BatchRows

    data = open_run_data(asked.run_dir)
    index = data.batch_index(asked.step)
    batch = data.batches.batch(index)
    chosen = _chosen_rows(asked, len(batch.rows))
    numbers = np.arange(chosen.start, chosen.stop, dtype=np.int64)
    rows = rows_read(data.batches, data.dataset.tokenizer, index, numbers)
    shown = BatchRows(data, asked.step, batch, rows)
    if asked.json:
        print(json.dumps(shown.to_json()))
        return 0
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in shown.lines(plain=not console.is_terminal):
        console.print(line)
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
