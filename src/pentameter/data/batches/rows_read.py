"""Batch rows shown to people as training reads them: data sets, documents, tokens, text and loss
mask.

They come from `TrainingBatches`, which also feeds the training, so they cannot differ from what is
trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.config.data_schema import DataConfig
from pentameter.data.batches.step import Int64, TrainingBatches, masked_tokens
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.planning.architecture import IGNORED_TARGET


@dataclass(frozen=True)
class Span:
    """Consecutive tokens [start, stop) of a split, with the documents in which they lie."""

    start: int
    stop: int
    first_document: int
    """Index, in the split, of the document that holds the first token."""
    last_document: int
    offset: int
    """Tokens in the first document before the span."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of a batch row as decoded text: either ordinary tokens or a single special
    token. `counts` says whether these tokens count as targets in the loss."""

    text: str
    is_special: bool
    counts: bool


@dataclass(frozen=True)
class RowRead:
    """A batch row as a training step reads it: where its text is from, and its tokens as text. A
    frozen record."""

    row: int
    """Its index in the global batch."""
    source: int
    """Index of its data set in `data.sources`; 0 for a single one."""
    spans: tuple[Span, ...]
    tokens: list[int]
    """Token ids (n,), at most context_length + 1: the inputs are all but the last, the targets all
    but the first."""
    counts: list[bool]
    """Whether each token (n,) is a target that counts in the loss; the first never is one."""
    n_padded: int
    """Positions in the row without a token."""
    stretches: tuple[Stretch, ...]

    @property
    def n_targets(self) -> int:
        """Number of targets that count in the loss."""
        return sum(self.counts)

    def origin(self, source: str) -> str:
        """Return in words where the row's text is from: its data set, named `source`, its documents
        there, and the numbers of its tokens in the training split."""
        if not self.spans:
            return source
        begin, end = self.spans[0], self.spans[-1]
        documents = f"document {begin.first_document:,}"
        if end.last_document != begin.first_document:
            documents = f"documents {begin.first_document:,} to {end.last_document:,}"
        return f"{source}, {documents}, tokens {begin.start:,} to {end.stop - 1:,}"

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return {**asdict(self), "n_targets": self.n_targets}


def source_names(data: DataConfig) -> list[str]:
    """Return corpus or path of each data source, as configured; one without `data.sources`."""
    return [each.shown for each in data.sources or (data,)]


def rows_read(
    batches: TrainingBatches, tokenizer: Tokenizer, batch_index: int, rows: Int64
) -> list[RowRead]:
    """Return the rows with numbers `rows` (B,) in the global batch for step `batch_index`, counted
    from 0; `tokenizer` decodes their text."""
    batch = batches.batch(batch_index, rows)
    found = []
    for index, each in enumerate(batches.source_rows(batch_index, rows)):
        ids, _ = masked_tokens(each.split, each.row)
        targets = batch.targets[index]
        counts = np.append(False, targets[: len(ids) - 1] != IGNORED_TARGET)
        found.append(
            RowRead(
                row=int(rows[index]),
                source=each.source,
                spans=tuple(_span(each.split.document_starts, *span) for span in each.row),
                tokens=ids.tolist(),
                counts=counts.tolist(),
                n_padded=len(targets) + 1 - len(ids),
                stretches=tuple(_stretches(ids, counts, tokenizer)),
            )
        )
    return found


def _span(document_starts: Int64, start: int, stop: int) -> Span:
    first, last = (np.searchsorted(document_starts, [start, stop - 1], side="right") - 1).tolist()
    return Span(start, stop, first, last, start - int(document_starts[first]))


def _stretches(
    ids: npt.NDArray[Any], counts: npt.NDArray[np.bool_], tokenizer: Tokenizer
) -> Iterator[Stretch]:
    """Yield a row's text as stretches: maximal runs of tokens that all count in the loss, or all do
    not, by `counts` (n,). A special token is a stretch by itself. `ids` (n,) are the row's token
    ids."""
    special = {number: text for text, number in tokenizer.special_tokens.items()}
    if (end := tokenizer.end_of_text) is not None:
        special.setdefault(end, tokenizer.decode([end]))
    alike = [
        (position if token in special else -1, counted)
        for position, (token, counted) in enumerate(zip(ids.tolist(), counts.tolist(), strict=True))
    ]
    position = 0
    for (special_at, counted), group in itertools.groupby(alike):
        stop = position + len(list(group))
        is_special = special_at >= 0
        text = special[int(ids[position])] if is_special else tokenizer.decode(ids[position:stop])
        yield Stretch(text, is_special, counted)
        position = stop
