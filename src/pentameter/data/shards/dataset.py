"""A data set as training and evaluation read it: a tokenizer and three splits of tokens, with their
documents and what of them is learned."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from pentameter.data.shards.format import ENCODED_WHOLE, SPLITS
from pentameter.data.tokenizers.base import LibraryBacked, Tokenizer
from pentameter.errors import ConfigError

Int64 = npt.NDArray[np.int64]


class TokenSequence:
    """Token ids in one or more memory-mapped arrays, read like one 1-D array: `tokens[a:b]` is an
    array (a view if it lies in one file), `tokens[i]` an int. It covers the tokens [start, stop) of
    the arrays, counted from the first array's start."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], start: int, stop: int) -> None:
        self._arrays: list[npt.NDArray[Any]] = []
        self._starts = [0]  # offset of each array's first token, and the end
        for array in arrays:
            self._append(array)
        self._start, self._stop = start, stop
        self.waiting: Callable[[], None] = lambda: None
        """Called repeatedly while a token stream waits for tokens, so that a watchdog sees that
        this process is alive."""

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def dtype(self) -> np.dtype[Any]:
        """The ids' dtype: uint16 or uint32, little-endian."""
        return self._arrays[0].dtype

    def up_to(self, n_tokens: int) -> int:
        """Return how many of the first `n_tokens` tokens exist: `n_tokens`, or all if there are
        fewer. A `TokenStream`, whose text is still being tokenized, first waits for them."""
        return min(n_tokens, len(self))

    def hash_of(self, n_tokens: int) -> str | None:
        """Return None: `Dataset.hash` identifies these tokens. A `TokenStream`, whose later text
        may change, returns the sha256, in hex, over its first `n_tokens`."""
        return None

    def prepare(self, n_tokens: int) -> None:
        """Do nothing: all of this split's tokens exist. A `TokenStream`, whose text is still being
        tokenized, starts to make `n_tokens` tokens here."""

    def close(self) -> None:
        """Do nothing. A `TokenStream` stops tokenizing in the background."""

    def part(self, start: int, stop: int) -> TokenSequence:
        """Return the tokens [start, stop) as a TokenSequence over the same arrays."""
        return TokenSequence(self._arrays, self._start + start, self._start + stop)

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return the tokens as one or more arrays, views without a copy."""
        return self._views(self._start, self._stop)

    def _append(self, array: npt.NDArray[Any]) -> None:
        """Add an array at the end; the sequence then extends to the array's last token."""
        self._arrays.append(array)
        self._starts.append(self._starts[-1] + len(array))
        self._stop = self._starts[-1]

    def _views(self, start: int, stop: int) -> list[npt.NDArray[Any]]:
        """Return views of the arrays' tokens [start, stop), in order; one empty array if there are
        none."""
        found = []
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            first, end = self._starts[number], min(stop, self._starts[number + 1])
            found.append(self._arrays[number][start - first : end - first])
            start, number = end, number + 1
        return found or [np.empty(0, dtype=self.dtype)]

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> npt.NDArray[Any]: ...
    def __getitem__(self, index: int | slice) -> int | npt.NDArray[Any]:
        if not isinstance(index, slice):
            index = range(len(self))[index]  # IndexError, and negative indices, as for a list
            return int(self[index : index + 1][0])
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"tokens are read in steps of 1, not {step}")
        views = self._views(self._start + start, self._start + max(start, stop))
        return views[0] if len(views) == 1 else np.concatenate(views)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        return np.array(self[:], dtype=dtype)


@dataclass(frozen=True, eq=False)
class AssistantRanges:
    """The tokens of the assistant's answers in a split of conversations, as ranges of positions. A
    model learns only these."""

    bounds: npt.NDArray[np.int64]
    """(n_ranges, 2): start and stop of each range, relative to the split, in order, without
    overlap; memory-mapped."""
    n_tokens: int
    n_bytes: int
    """UTF-8 bytes in the ranges' text."""

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return the loss mask (stop - start,) for the split's tokens [start, stop): True for
        assistant tokens."""
        inside = np.zeros(stop - start, dtype=bool)
        number = int(np.searchsorted(self.bounds[:, 1], start, side="right"))
        while number < len(self.bounds) and self.bounds[number, 0] < stop:
            first, last = self.bounds[number].tolist()
            inside[max(first - start, 0) : last - start] = True
            number += 1
        return inside

    def count(self, starts: Int64, stops: Int64) -> Int64:
        """Return, for each window of tokens [start, stop), the number of its tokens that belong to
        an assistant's answers. `starts` and `stops` (n,) hold the windows' bounds as positions in
        the data set; the result is (n,)."""
        lengths = self.bounds[:, 1] - self.bounds[:, 0]
        before = np.append(0, np.cumsum(lengths))  # tokens in earlier ranges

        def up_to(positions: Int64) -> Int64:
            number = np.searchsorted(self.bounds[:, 1], positions, side="right")
            starts = np.append(self.bounds[:, 0], np.iinfo(np.int64).max)[number]
            return np.asarray(before[number] + np.maximum(positions - starts, 0))

        return up_to(stops) - up_to(starts)


@dataclass(frozen=True)
class TokenSplit:
    """One split of a data set: its tokens, documents and size in bytes."""

    name: str
    """The split's name: train, val or test; for an evaluation text, the text's."""
    tokens: TokenSequence
    """The token ids, memory-mapped."""
    n_bytes: int
    """UTF-8 bytes of the split's text; bits per byte are computed with it."""
    document_starts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """Index of each document's first token (n_documents,), relative to the split."""
    assistant: AssistantRanges | None = None
    """The tokens that a model learns, in conversations; None if it learns all."""
    parts: tuple[TokenSplit, ...] = ()
    """The splits of several data sets that this one concatenates; empty for a single data set."""
    beginning: TokenSplit | None = None
    """For a token stream, whose text is still being tokenized, a split with the tokens of its first
    part, which exist whenever a run starts; None for a split that is complete."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the split; in a token stream, of those written so far."""
        return len(self.tokens)

    @property
    def first_prompt(self) -> npt.NDArray[np.int64]:
        """Token ids (n_tokens,) of the split's first conversation up to its first answer; an empty
        array if the split has no conversations, or begins with an answer."""
        for split in self.parts or (self,):
            if split.assistant is not None and len(split.assistant.bounds):
                answer = int(split.assistant.bounds[0, 0])
                bounds = split.document_bounds
                start = int(bounds[np.searchsorted(bounds, answer, side="right") - 1])
                return np.asarray(split.tokens[start:answer], dtype=np.int64)
        return np.zeros(0, dtype=np.int64)

    @property
    def tokens_per_byte(self) -> float:
        """Learned tokens (all, or in conversations the assistant's) ÷ UTF-8 bytes in their text."""
        if self.assistant is None:
            return self.n_tokens / self.n_bytes
        return self.assistant.n_tokens / self.assistant.n_bytes

    @property
    def document_bounds(self) -> npt.NDArray[np.int64]:
        """Index of each document's first token, then the split's end (n_documents + 1,)."""
        return np.append(np.asarray(self.document_starts, dtype=np.int64), self.n_tokens)


def concatenated(name: str, parts: Sequence[TokenSplit]) -> TokenSplit:
    """Return one split with the tokens of all `parts` in order, which it lists as its `parts`. If
    only some parts are conversations, all tokens in the other parts count as assistant tokens,
    which are learned."""
    ends = np.cumsum([0, *(part.n_tokens for part in parts)]).tolist()
    arrays = [array for part in parts if part.n_tokens for array in part.tokens.arrays()]
    starts = [
        np.asarray(p.document_starts, np.int64) + n for p, n in zip(parts, ends, strict=False)
    ]
    assistant = None
    if any(part.assistant is not None for part in parts):
        ranges = [part.assistant or _all_tokens(part) for part in parts]
        assistant = AssistantRanges(
            np.concatenate([r.bounds + end for r, end in zip(ranges, ends, strict=False)]),
            sum(r.n_tokens for r in ranges),
            sum(r.n_bytes for r in ranges),
        )
    tokens = TokenSequence(arrays or parts[0].tokens.arrays(), 0, ends[-1])
    n_bytes = sum(part.n_bytes for part in parts)
    return TokenSplit(name, tokens, n_bytes, np.concatenate(starts), assistant, tuple(parts))


def _all_tokens(split: TokenSplit) -> AssistantRanges:
    """Return a split's tokens as a single assistant range; no range if it is empty."""
    bounds = np.array([[0, split.n_tokens]] if split.n_tokens else [], np.int64).reshape(-1, 2)
    return AssistantRanges(bounds, split.n_tokens, split.n_bytes)


def first_tokens(split: TokenSplit, n_tokens: int) -> TokenSplit:
    """Return the beginning of a split: the fewest whole documents that have at least `n_tokens`; in
    a text of one document, exactly `n_tokens`. The whole split if it has no more.

    If it concatenates several parts, each is shortened in proportion to its size. Of a token stream
    only the first part is used, so that nothing waits. `n_bytes` shrinks in proportion to the
    tokens.
    """
    split = split.beginning or split
    if split.parts:
        parts = [part.beginning or part for part in split.parts]
        whole = max(sum(part.n_tokens for part in parts), n_tokens)
        sizes = [-(-n_tokens * part.n_tokens // whole) for part in parts]
        return concatenated(
            split.name, [first_tokens(p, size) for p, size in zip(parts, sizes, strict=True)]
        )
    if n_tokens >= split.n_tokens:
        return split
    bounds, assistant = split.document_bounds, split.assistant
    last = int(np.searchsorted(bounds, n_tokens))  # the document in which they end
    is_cut = len(bounds) == 2 and assistant is None  # a conversation may end with its only answer
    stop = n_tokens if is_cut else int(bounds[last])
    if assistant is not None:
        kept = assistant.bounds[: np.searchsorted(assistant.bounds[:, 0], stop)]
        n_kept = int((kept[:, 1] - kept[:, 0]).sum())
        n_bytes = max(1, round(assistant.n_bytes * n_kept / assistant.n_tokens))
        assistant = AssistantRanges(kept, n_kept, n_bytes)
    starts = split.document_starts[:last]
    n_bytes = max(1, round(split.n_bytes * stop / split.n_tokens))
    return TokenSplit(split.name, split.tokens.part(0, stop), n_bytes, starts, assistant)


@dataclass(frozen=True)
class Dataset:
    """Prepared data, opened and checked: a tokenizer and the splits train, val and test."""

    tokenizer: Tokenizer
    """The tokenizer that made the tokens."""
    hash: str
    """The sha256, in hex, over tokens, splits and tokenizer: the same for the same data in any
    folder."""
    splits: Mapping[str, TokenSplit]
    folders: tuple[Path, ...] = ()
    """The shards' folder; for several data sets, each one's in order."""
    header: Mapping[str, Any] = field(default_factory=dict)
    """The shards' header (`format.py`); empty for several data sets and for a stream."""
    holds: tuple[str, ...] = ()
    """The content of each data set's files in words, "" for text; empty for prepared shards."""

    @property
    def vocab_size(self) -> int:
        """Number of distinct ids in the tokenizer's vocabulary."""
        return self.tokenizer.vocab_size

    @property
    def training_tokens(self) -> list[TokenSequence]:
        """The training tokens, one TokenSequence per data set."""
        train = self.splits["train"]
        return [split.tokens for split in train.parts or (train,)]

    def hash_of(self, n_tokens: int) -> str:
        """Return the sha256, in hex, that identifies what a run has read after `n_tokens` training
        tokens. For a token stream it covers these tokens alone, as later text may have changed;
        otherwise it is `hash`."""
        known = None
        if len(self.training_tokens) == 1:
            known = self.training_tokens[0].hash_of(n_tokens)
        return known or self.hash

    @property
    def is_of_fragments(self) -> bool:
        """Whether the data are conversations that an earlier version encoded piece by piece. With
        this tokenizer a piece may get other tokens than it has within the whole text."""
        has_marks = "answers" in self.header and not ENCODED_WHOLE.items() <= self.header.items()
        return has_marks and isinstance(self.tokenizer, LibraryBacked)

    def close(self) -> None:
        """Stop any tokenizing in the background."""
        for tokens in self.training_tokens:
            tokens.close()

    @property
    def has_conversations(self) -> bool:
        """Whether some of the data is conversations, in which only assistant tokens are learned."""
        return self.split("train").assistant is not None

    def split(self, name: str) -> TokenSplit:
        """Return the split `train`, `val` or `test`, which may be empty; ConfigError for another
        name."""
        if name not in self.splits:
            raise ConfigError(f"there is no split {name!r}; possible: {', '.join(SPLITS)}")
        return self.splits[name]
