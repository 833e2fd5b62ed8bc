"""The batch rows that a step reads, as lines for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from pentameter.data.batches.rows_read import RowRead, Stretch
from pentameter.data.batches.step import Batch
from pentameter.errors import printable
from pentameter.record.run_data import RunData

SHOWN_SPANS = 8
"""Most document spans in a packed row that are listed above its text."""
TERMINAL_LEGEND = "dim: read, but no target that counts in the loss · ‹bold›: a special token"
LEGEND = "⟦…⟧ read, but no target that counts in the loss · ‹…› a special token"


@dataclass(frozen=True)
class BatchRows:
    """Some rows of the batch that step `step`, counted from 1, of a run reads."""

    data: RunData
    step: int
    batch: Batch
    rows: Sequence[RowRead]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `data --json` prints."""
        return {
            "name": self.data.config.name,
            "step": self.step,
            "batch_index": self.step - 1,
            "batch_sha256": self.batch.hash(),
            "batch_rows": len(self.batch.rows),
            "context_length": self.data.config.model.context_length,
            "n_targets": self.batch.n_targets,
            "sources": self.data.source_names,
            "rows": [each.to_json() for each in self.rows],
        }

    def lines(self, *, plain: bool) -> Iterator[Text]:
        """Yield lines for people. Tokens that do not count in the loss are dim; with `plain`, which
        is for output without styles, they are inside ⟦ ⟧."""
        n_rows, index, config = len(self.batch.rows), self.step - 1, self.data.config
        per_epoch = self.data.batches.rows_per_epoch
        epoch = "" if per_epoch is None else f" · epoch {index * n_rows // per_epoch:,}"
        yield Text(
            f"{config.name}, step {self.step:,}: batch {index:,} (counted from 0), {n_rows:,} "
            f"rows × {config.model.context_length:,} tokens · {self.batch.n_targets:,} targets "
            f"count{epoch} · sha256 {self.batch.hash()[:16]}"
        )
        yield Text(LEGEND if plain else TERMINAL_LEGEND)
        for row in self.rows:
            yield Text()
            yield Text("\n".join(self._heading(row)), "bold")
            text = Text()
            for words, style in _styled(row.stretches, plain=plain):
                text.append(printable(words, keep="\n\t"), style)
            for line in text.split("\n", allow_blank=True):
                yield Text("  │ ").append_text(line)
        if (n_left_out := n_rows - len(self.rows)) > 0:
            yield Text(f"\n{n_left_out:,} of {n_rows:,} rows are not shown: --rows :, or --json")

    def _heading(self, row: RowRead) -> Iterator[str]:
        """Yield the lines above a row's text: its number, source and targets, and a line per
        document span."""
        source = printable(self.data.source_names[row.source])
        n_targets = len(row.tokens) - 1 + row.n_padded
        padded = f" · {row.n_padded:,} padded" if row.n_padded else ""
        counting = f"{row.n_targets:,} of {n_targets:,} targets count"
        yield f"row {row.row:,} · {source} · {counting}{padded}"
        for span in row.spans[:SHOWN_SPANS]:
            documents = f"document {span.first_document:,}"
            if span.last_document > span.first_document:
                documents = f"documents {span.first_document:,} to {span.last_document:,}"
            begins = f", from its token {span.offset:,}" if span.offset else ""
            yield f"  train {span.start:,} to {span.stop - 1:,} · {documents}{begins}"
        if (n_left_out := len(row.spans) - SHOWN_SPANS) > 0:
            yield f"  and {n_left_out:,} more documents (--json lists them)"


def _styled(stretches: tuple[Stretch, ...], *, plain: bool) -> Iterator[tuple[str, str]]:
    """Yield (text, rich style) for each stretch, which is consecutive tokens in a row that all
    count in the loss, or all do not. With `plain`, styles are empty, and ⟦ ⟧ enclose tokens that do
    not count."""
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
